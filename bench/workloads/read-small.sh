# A program on the workstation reads many small files, one after the other.
#
# S1: directory with tree/ (on the mount)
cat "$S1"/tree/*/* > "$OUT/contents"
