# An archive of many small files, unpacked where it lies.
#
# S1: directory with tree.tar (on the mount)
mkdir "$S1/tree"
tar -x -f "$S1/tree.tar" -C "$S1/tree"
