//! Commands that list, copy, remove and change files.

use crate::reading::check;

#[test]
fn find_searches_trees_whose_results_this_machine_need_not_know() {
    check(&[
        ("find /m/logs -name '*.log'", "walks /m/logs!; shows [Order]; tty"),
        ("find -type f -print0", "reads .; shows [Order]; tty"),
        (
            "find /a /b ( -name x -o -iname 'y*' ) -prune -o -print",
            "walks /a!; walks /b!; split 2; shows [Order]; tty",
        ),
        ("find /a /b -name x -quit", "walks /a!; walks /b!; shows [Order]; tty"),
        ("find -H /a -maxdepth 2 -size +1k", "walks /a; shows [DirSize, Order]; tty"),
        ("find . ! -path './.git/*' -regex '.*[0-9]'", "walks .!; shows [Order]; tty"),
        (
            "find /a -newer /b/stamp -mtime -3",
            "walks /a!; reads /b/stamp; shows [Times, Order]; tty; varies",
        ),
        (r"find /a -printf '%p %s\n'", "walks /a!; shows [DirSize, Order]; tty"),
        (
            r"find /a -printf '%T@ %p\n'",
            "here: find: the -printf format has directives that show more than names, types, sizes and modes",
        ),
        (
            "find -L /a -name x",
            "here: find: follows symlinks below the starting points, which may lead anywhere",
        ),
        (
            "find . -name x -exec grep y '{}' + -print",
            "here: find: starts other commands, which are placed one by one",
        ),
        (
            "find . -delete",
            "here: find: deletes through the mount, so that the names that it has cached stay right",
        ),
        (
            "find . -lname x",
            "here: find: reads symlinks, which a mount may show otherwise or not at all",
        ),
        (
            "find . -user alice",
            "here: find: looks up user and group names on the machine that it runs on",
        ),
        (
            "find . -xtype l",
            "here: find: follows symlinks below the starting points, which may lead anywhere",
        ),
        ("find . -executable", "here: find: asks this machine's kernel what the user may do"),
        ("find -files0-from list", "here: find: the starting points come from a file"),
        ("find . -nosuch", "here: flag -nosuch of find is not annotated"),
    ]);
}

#[test]
fn ls_lists_names() {
    check(&[
        ("ls", "reads .; tty"),
        ("ls -1 /m /n", "reads /m; reads /n; tty"),
        ("ls -d '/m/*' x", "reads /m/*!; reads x!; tty"),
        ("ls -R /m", "walks /m; tty"),
        (
            "ls -la",
            "here: ls: a long listing shows owners, links, blocks and access lists as this machine sees them",
        ),
        (
            "ls -lh --color=auto /m",
            "here: ls: a long listing shows owners, links, blocks and access lists as this machine sees them",
        ),
        ("ls --color=auto /m", "reads /m; asks"),
        (
            "ls --color /m",
            "here: ls: colours tell of capabilities of files, which mounts do not carry",
        ),
        ("ls --color=always /m", "here: ls: the value always is not annotated of --color"),
        ("ls -t /m", "reads /m; shows [Times]; tty"),
        ("ls -S /m", "reads /m; shows [DirSize]; tty"),
        ("ls -f /m", "reads /m; shows [Order]; tty"),
        ("ls -F link", "reads link!; shows [Mode]; tty"),
        ("ls -FH link", "reads link; shows [Mode]; tty"),
        ("ls -i /m", "reads /m; shows [Inode]; tty"),
        ("ls -L /m", "here: ls: follows symlinks in the directories, which may lead anywhere"),
        ("ls --hyperlink /m", "here: flag --hyperlink of ls is not annotated"),
        ("ls -- -", "reads -; tty"),
    ]);
}

#[test]
fn du_shows_what_mounts_may_not() {
    check(&[
        ("du -sh /m", "walks /m!; shows [Inode, Links, Blocks]"),
        ("du -sb /m", "walks /m!; shows [Inode, Links, DirSize]"),
        ("du --max-depth=1 /m", "walks /m!; shows [Inode, Links, Blocks, Order]"),
        ("du -L /m", "here: du: follows symlinks in the tree, which may lead anywhere"),
        ("du -D link", "walks link; shows [Inode, Links, Blocks, Order]"),
        ("du -x --inodes .", "walks .!; shows [Inode, Links, Device, Order]"),
        ("du --files0-from=list", "here: flag --files0-from of du is not annotated"),
    ]);
}

#[test]
fn stat_needs_a_known_format() {
    check(&[
        (
            "stat /m/a",
            "here: stat: shows device and inode numbers, blocks and times as this machine sees them",
        ),
        ("stat -c '%n %s' /m/a /m/b", "reads /m/a!; reads /m/b!; split 2; shows [DirSize]"),
        (r"stat --printf='%n\n' /m/a", "reads /m/a!"),
        (
            "stat -c '%U %n' /m/a",
            "here: stat: the format has directives that show what differs between machines",
        ),
        ("stat -c %Y -L /m/link", "reads /m/link; shows [Times]"),
        (
            "stat -c %N /m/a",
            "here: stat: the format has directives that show what differs between machines",
        ),
        (
            "stat -f -c %n /m",
            "here: stat: describes the file system as this machine has mounted it",
        ),
        (
            "stat -c %d /m/a",
            "here: stat: the format has directives that show what differs between machines",
        ),
        ("stat -c %n -", "here: stat: describes its own standard input"),
    ]);
}

#[test]
fn file_reads_the_beginnings() {
    check(&[
        ("file /m/a /m/b", "reads /m/a; reads /m/b; shows [Mode]"),
        ("file -b /m/a /m/b", "reads /m/a; reads /m/b; split 2; shows [Mode]"),
        ("file -i -N a b", "reads a; reads b; split 2; shows [Mode]"),
        ("file -", "stdin early; shows [Mode]"),
        ("file -f names", "lists names; shows [Mode]"),
        ("file -z a.gz", "here: flag -z of file is not annotated"),
        ("MAGIC=/my/magic file a", "here: file: MAGIC names other magic files"),
    ]);
}

#[test]
fn cp_copies_where_the_data_is() {
    check(&[
        ("cp a b", "reads a; fills b"),
        ("cp -r a b c", "walks a!; walks b!; fills c; shows [Symlinks]; once"),
        (
            "cp -a tree copy",
            "walks tree!; fills copy; shows [Owner, Inode, Links, Times, Symlinks]; once",
        ),
        ("cp -p a b", "reads a; fills b; shows [Owner, Times]"),
        ("cp --preserve=mode a b", "reads a; fills b"),
        (
            "cp --preserve=all a b",
            "here: cp: extended attributes and contexts differ between a mount and its server",
        ),
        ("cp -t dir a b", "fills dir; reads a; reads b"),
        ("cp -T a b", "reads a; makes b"),
        ("cp -rT a b", "walks a!; fills b; shows [Symlinks]; once"),
        ("cp -i a b", "here: cp: asks before it overwrites"),
        ("cp -rL a b", "here: cp: follows symlinks in the tree, which may lead anywhere"),
        ("cp -u a b", "reads a; fills b; shows [Times]; once"),
        ("cp -n a -", "reads a; fills -; once"),
        ("cp --reflink=auto --sparse=never a b", "reads a; fills b"),
        (
            "cp --reflink a b",
            "here: cp: whether blocks can be shared depends on the file system as this machine sees it",
        ),
        ("cp -b a b", "here: flag -b of cp is not annotated"),
        (
            "cp -l a b",
            "here: cp: hard links are made through the mount: cheap, and the names it has cached stay right",
        ),
        ("cp a", "here: cp: an operand is missing"),
    ]);
}

#[test]
fn mv_stays() {
    check(&[
        (
            "mv a b",
            "here: mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mv -f a b dir",
            "here: mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mv -t dir a",
            "here: mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mv -i a b",
            "here: mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mv --backup a b",
            "here: mv: renames through the mount: cheap, and the names it has cached stay right",
        ),
    ]);
}

#[test]
fn rm_takes_whole_trees() {
    check(&[
        (
            "rm a",
            "here: rm: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        ("rm -rf tree", "fills tree!"),
        ("rm -r tree", "fills tree!; asks; once"),
        ("rm -rv tree", "fills tree!; shows [Order]; asks; once"),
        (
            "rm -f a b",
            "here: rm: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        ("rm -ri tree", "here: rm: asks before it removes"),
        ("rm -rf --no-preserve-root /", "here: flag --no-preserve-root of rm is not annotated"),
        ("rm -rf -- -x", "fills -x!"),
    ]);
}

#[test]
fn cheap_changes_of_names_stay() {
    check(&[
        (
            "mkdir -p a/b",
            "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mkdir a b",
            "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "mkdir -m 700 a",
            "here: mkdir: makes names through the mount: cheap, and the names it has cached stay right",
        ),
        ("mkdir -Z a", "here: flag -Z of mkdir is not annotated"),
        ("mkdir", "here: mkdir: an operand is missing"),
        (
            "rmdir a",
            "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "rmdir -p a/b",
            "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "rmdir --ignore-fail-on-non-empty a",
            "here: rmdir: removes names through the mount: cheap, and the names it has cached stay right",
        ),
        ("rmdir -q a", "here: flag -q of rmdir is not annotated"),
        ("rmdir", "here: rmdir: an operand is missing"),
        (
            "touch a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -r b a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -d yesterday a",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        (
            "touch -h -",
            "here: touch: sets times through the mount: cheap, and the names and times it has cached stay right",
        ),
        ("touch", "here: touch: an operand is missing"),
        (
            "ln -s a b",
            "here: ln: makes links through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "ln a b",
            "here: ln: makes links through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "ln -sf a b dir",
            "here: ln: makes links through the mount: cheap, and the names it has cached stay right",
        ),
        (
            "ln -t dir a",
            "here: ln: makes links through the mount: cheap, and the names it has cached stay right",
        ),
        ("ln --relative", "here: ln: an operand is missing"),
        (
            "dd if=a of=b bs=1M",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd of=b conv=notrunc",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        (
            "dd status=none",
            "here: dd: its files are parts of words (if=FILE), and what it counts are reads, which depend on timing",
        ),
        ("dd --help", "here: dd: is about the dd of this machine"),
    ]);
}

#[test]
fn chmod_takes_whole_trees() {
    check(&[
        (
            "chmod 644 a",
            "here: chmod: changes single files through the mount: cheap, and the modes it has cached stay right",
        ),
        ("chmod -R 644 tree", "fills tree; shows [Mode]"),
        ("chmod -R u+w tree other", "fills tree; fills other; shows [Mode]; once"),
        ("chmod -Rv 755 tree", "fills tree; shows [Mode, Order]; once"),
        ("chmod -R --reference=a tree", "reads a; fills tree; shows [Mode]"),
        ("chmod -x a", "here: flag -x of chmod is not annotated"),
        ("chmod -R -w tree", "here: flag -w of chmod is not annotated"),
    ]);
}
