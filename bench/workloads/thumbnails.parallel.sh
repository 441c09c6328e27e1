# By hand, with GNU parallel on the server.
$SSH "$H1" "$WITH bash -s" << 'END'
mkdir "$S1/thumbnails"
parallel --will-cite -n 5 mogrify -format gif -path "$S1/thumbnails" -thumbnail 100x100 {} ::: "$S1"/images/*.ppm
END
