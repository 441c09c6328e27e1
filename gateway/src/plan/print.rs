//! A plan as text: one line per stage, for logs and tests.

use std::fmt;

use super::{Placement, Plan, Site, StagePart};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, placement) in self.placements.iter().enumerate() {
            match placement {
                Placement::Here(reason) => writeln!(f, "{index}: here ({reason})")?,
                Placement::Remote(parts) => {
                    let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
                    writeln!(f, "{index}: {}{}", parts.join(" + "), self.joins[index])?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for StagePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Site::Executor(self.executor).fmt(f)?;
        if let Some(operands) = &self.operands {
            write!(f, " {operands:?}")?;
        }
        f.write_str(if self.needs_newline { "!" } else { "" })
    }
}
