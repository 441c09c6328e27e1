# By hand, with GNU parallel: it calls the servers at once and keeps the order.
visits() { $SSH "$1" "cat '$2'/logs/*.csv | grep '^$VISITOR,'"; }
export -f visits
parallel --will-cite -k --link visits {1} {2} \
    ::: "$H1" "$H2" "$H3" "$H4" "$H5" ::: "$S1" "$S2" "$S3" "$S4" "$S5" > "$OUT/visits.csv"
