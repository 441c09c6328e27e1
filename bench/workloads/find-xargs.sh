# Files are found by name in a tree of many, and searched.
#
# S1: directory with tree/ (on the mount)   PATTERN: the names that are searched
find "$S1/tree" -name "$PATTERN" | sort | xargs grep -c return | sort -t: -k2,2nr -k1,1 | head -n 20
