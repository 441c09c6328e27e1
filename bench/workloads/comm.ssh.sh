# By hand: both lists come here.
comm -12 <($SSH "$H1" "$WITH cat '$S1/sorted'") <($SSH "$H2" "$WITH cat '$S2/sorted'") > "$OUT/both"
