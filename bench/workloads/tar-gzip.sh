# A copy of a remote source tree, packed, beside the user.
#
# S1: directory with tree/ (on the mount)   OUT: directory for the result (local)
tar -c -C "$S1" tree | gzip -n > "$OUT/tree.tar.gz"
