# A program on the workstation looks at every file of a tree that it has not seen yet.
#
# S1: directory with tree/ (on the mount)
find "$S1/tree" -type f -printf '%P %s %m\n' | sort > "$OUT/files"
