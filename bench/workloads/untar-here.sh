# A program on the workstation unpacks an archive of many small files onto the mount, until they are on the server.
#
# S1: directory with tree.tar (on the mount)
cp "$S1/tree.tar" "$OUT/tree.tar"
mkdir "$S1/tree"
tar -x -f "$OUT/tree.tar" -C "$S1/tree"
sync "$S1/tree"
rm "$OUT/tree.tar"
