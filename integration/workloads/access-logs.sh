# Distributed log analysis (paper §7.1): one address in the access logs of five servers.
#
# S1 ... S5: directories with logs/*.csv (on five mounts)   VISITOR: the address
# OUT: directory for the result (local)
cat "$S1"/logs/*.csv "$S2"/logs/*.csv "$S3"/logs/*.csv "$S4"/logs/*.csv "$S5"/logs/*.csv |
    grep "^$VISITOR," > "$OUT/visits.csv"
