# Thumbnail generation (paper §7.1): the thumbnails stay on the mount.
#
# S1: directory with images/*.ppm (on the mount)
mkdir "$S1/thumbnails"
mogrify -format gif -path "$S1/thumbnails" -thumbnail 100x100 "$S1"/images/*.ppm
