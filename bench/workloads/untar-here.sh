# A program on the workstation unpacks an archive of many small files onto the mount.
#
# S1: directory with tree.tar (on the mount)
cp "$S1/tree.tar" "$OUT/tree.tar"
mkdir "$S1/tree"
tar -x -f "$OUT/tree.tar" -C "$S1/tree"
rm "$OUT/tree.tar"
