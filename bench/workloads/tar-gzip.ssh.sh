# By hand.
$SSH "$H1" "$WITH tar -c -C '$S1' tree | gzip -n" > "$OUT/tree.tar.gz"
