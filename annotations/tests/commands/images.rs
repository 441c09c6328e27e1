//! ImageMagick.

use crate::reading::check;

#[test]
fn mogrify_makes_thumbnails() {
    check(&[
        (
            "mogrify  -format gif -path thumbs_dir -thumbnail 100x100 data_dir/a.jpg data_dir/b.jpg",
            "fills thumbs_dir; reads data_dir/a.jpg; reads data_dir/b.jpg",
        ),
        (
            "mogrify -format gif -thumbnail 100x100 d/a.jpg d/b.jpg",
            "changes d/a.jpg; changes d/b.jpg; split 2",
        ),
        ("mogrify -format gif -path t a.jpg b.jpg", "fills t; reads a.jpg; reads b.jpg; split 2"),
        ("mogrify -format gif a.jpg a.png", "changes a.jpg; changes a.png; once"),
        ("mogrify -format jpg a.jpg b.jpg", "changes a.jpg; changes b.jpg; once"),
        ("mogrify -resize 50% a.jpg b.jpg", "changes a.jpg; changes b.jpg; once"),
        ("mogrify -format png a.jpg b.jpg", "changes a.jpg; changes b.jpg; split 2; shows [Times]"),
        ("mogrify -strip -format png a.jpg", "changes a.jpg"),
        (
            "mogrify -resize 50% 'a.jpg[0]'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "mogrify -resize 50% a.svg",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -crop 10x10 a.jpg", "here: mogrify: the -crop may make several images"),
        ("mogrify -crop 10x10+5+5 +repage a.jpg", "changes a.jpg; once"),
        (
            "mogrify -resize 50% '@names'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -write b.jpg a.jpg", "here: flag -write of mogrify is not annotated"),
        ("mogrify -draw 'point 1,1' a.jpg", "here: flag -draw of mogrify is not annotated"),
        (
            "mogrify -morphology Convolve '@kernel' a.jpg",
            "here: mogrify: reads a value from a file",
        ),
        (
            "mogrify -resize 50% '*.jpg'",
            "here: mogrify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("mogrify -resize 50%", "here: mogrify: an operand is missing"),
        (
            "MAGICK_CONFIGURE_PATH=/x mogrify -flip a.jpg",
            "here: mogrify: variables say where ImageMagick's files are",
        ),
    ]);
}

#[test]
fn convert_writes_one_file() {
    check(&[
        ("convert a.jpg -resize 50% b.gif", "reads a.jpg; makes b.gif"),
        ("convert a.jpg b.png", "reads a.jpg; makes b.png; shows [Times]"),
        ("convert a.jpg -strip b.png", "reads a.jpg; makes b.png"),
        ("convert a.jpg b.jpg +append c.jpg", "reads a.jpg; reads b.jpg; makes c.jpg"),
        ("convert a.jpg b.jpg c.jpg", "here: convert: may write several files"),
        ("convert a.jpg b.jpg c.gif", "reads a.jpg; reads b.jpg; makes c.gif"),
        (
            "convert a.gif b.jpg",
            "here: convert: may write several files, if the input holds several images",
        ),
        (
            "convert a.jpg jpg:-",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert - b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert rose: b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert a.jpg 'b-%d.jpg'",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        (
            "convert ( a.jpg -flip ) b.jpg",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
        ("convert a.jpg -define registry:x=/y b.jpg", "here: convert: the -define is not known"),
        (
            "convert a.jpg b.pdf",
            "here: convert: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
    ]);
}

#[test]
fn identify_describes_images() {
    check(&[
        ("identify a.jpg", "reads a.jpg; varies"),
        (r"identify -format '%w %h\n' a.jpg b.png", "reads a.jpg; reads b.png"),
        ("identify -format '%[EXIF:Model]' a.jpg", "reads a.jpg"),
        (
            "identify -format '%[date:modify]' a.jpg",
            "here: identify: the format asks for more than names, sizes and numbers",
        ),
        (
            "identify -format '@f' a.jpg",
            "here: identify: the format asks for more than names, sizes and numbers",
        ),
        ("identify -verbose a.jpg", "here: flag -verbose of identify is not annotated"),
        (
            "identify -ping 'a.gif[0]'",
            "here: identify: the name of an image selects a coder, a frame or a pattern, or its format is not annotated",
        ),
    ]);
}
