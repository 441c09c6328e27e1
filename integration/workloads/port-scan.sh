# Port scan analysis (paper §7.1) without zannotate: addresses per autonomous system.
# The result stays on the mount.
#
# S1: directory with scan.json (on the mount)
cat "$S1/scan.json" | jq -r '.ip' > "$S1/addresses"
cat "$S1/scan.json" | jq -r '.zannotate.routing.asn' > "$S1/asns"
pr -mts, "$S1/addresses" "$S1/asns" |
    awk -F, '{ count[$2]++ } END { for (asn in count) print asn "," count[asn] }' |
    sort -t, -k2,2nr -k1,1n > "$S1/by-asn.csv"
