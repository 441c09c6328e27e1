# A program on the workstation looks at every file of a tree, and then four times again.
#
# S1: directory with tree/ (on the mount)
for walk in 1 2 3 4 5; do
    find "$S1/tree" -type f -printf '%P %s %m\n' > "$OUT/files"
done
sort -o "$OUT/files" "$OUT/files"
