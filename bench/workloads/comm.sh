# What two sorted lists on two servers have in common.
#
# S1, S2: directories with sorted (on two mounts)   OUT: directory for the result (local)
comm -12 "$S1/sorted" "$S2/sorted" > "$OUT/both"
