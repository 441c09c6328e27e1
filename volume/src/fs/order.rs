//! Orders in which programs open the files of a directory, and detection of the one in use.

use super::readers::By;
use crate::store::{FileId, Kind, Listed};

/// Files and subdirectories of a directory, in each order.
#[derive(Debug, Default)]
pub(super) struct Orders {
    files: [Vec<FileId>; 3],
    directories: [Vec<FileId>; 3],
}

/// Position after the last opened file of a directory in each order; 0: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cursor([usize; 3]);

impl Orders {
    pub fn of(names: &[Listed]) -> Self {
        Self { files: orders(names, Kind::Regular), directories: orders(names, Kind::Directory) }
    }

    pub fn files(&self, by: By) -> &[FileId] {
        &self.files[by as usize]
    }

    pub fn directories(&self, by: By) -> &[FileId] {
        &self.directories[by as usize]
    }

    /// Returns the files after a file; all, if it is not among them.
    pub fn files_after(&self, file: FileId, by: By) -> &[FileId] {
        after(self.files(by), file)
    }

    /// Returns the directories after a directory; all, if it is not among them.
    pub fn directories_after(&self, directory: FileId, by: By) -> &[FileId] {
        after(self.directories(by), directory)
    }
}

fn after(all: &[FileId], one: FileId) -> &[FileId] {
    let behind = all.iter().position(|other| *other == one).map_or(0, |place| place + 1);
    all.get(behind..).unwrap_or_default()
}

/// Returns files of a kind by name, as listed, and by inode.
fn orders(names: &[Listed], kind: Kind) -> [Vec<FileId>; 3] {
    let id = |listed: &Listed| {
        listed.entry.map(|entry| entry.attributes.id).filter(|_| listed.kind == kind)
    };
    let listed: Vec<FileId> = names.iter().filter_map(id).collect();
    let mut by_name: Vec<_> =
        names.iter().filter_map(|listed| Some((&listed.name, id(listed)?))).collect();
    by_name.sort_unstable();
    let mut by_inode = listed.clone();
    by_inode.sort_unstable();
    [by_name.into_iter().map(|(_, file)| file).collect(), listed, by_inode]
}

impl Cursor {
    /// Notes that a file is opened; returns the order in which it directly follows the previous
    /// one, if any.
    pub fn opened(&mut self, orders: &Orders, file: FileId) -> Option<By> {
        let before = self.0;
        for by in By::ALL {
            let place = orders.files(by).iter().position(|other| *other == file);
            self.0[by as usize] = place.map_or(0, |place| place + 1);
        }
        By::ALL
            .into_iter()
            .find(|by| before[*by as usize] > 0 && self.0[*by as usize] == before[*by as usize] + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Attributes, Entry, Leases, Stamp};

    fn listed(name: &str, inode: u64) -> Listed {
        let id = FileId { inode, generation: 0 };
        let attributes = Attributes::of_test(id, Kind::Regular);
        let entry = Some(Entry { attributes, leases: Leases::all(), stamp: Stamp(1) });
        Listed { name: name.into(), cookie: 0, entry, inode, kind: Kind::Regular }
    }

    #[test]
    fn each_order_is_told_from_the_others() {
        let orders = Orders::of(&[listed("c", 2), listed("a", 3), listed("d", 1), listed("b", 4)]);
        let check = |inodes: [u64; 2], expect| {
            let mut cursor = Cursor::default();
            let [first, second] = inodes.map(|inode| FileId { inode, generation: 0 });
            assert_eq!(cursor.opened(&orders, first), None);
            assert_eq!(cursor.opened(&orders, second), expect, "{inodes:?}");
        };
        check([3, 4], Some(By::Name));
        check([2, 3], Some(By::Listing));
        check([1, 2], Some(By::Inode));
        check([4, 1], None);
        check([3, 3], None);
        assert_eq!(orders.files_after(FileId { inode: 2, generation: 0 }, By::Name).len(), 1);
    }
}
