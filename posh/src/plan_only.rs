//! tmp
use crate::{Error,gateway::Target};
use std::num::NonZeroU32;
/// x
pub fn explain(_t:&Target,_p:&str,_j:bool,_s:Option<NonZeroU32>)->Result<String,Error>{ todo!() }
