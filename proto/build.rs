//! Compiles the contract with protox, so that no `protoc` is needed, and generates a table of its
//! fields for the check of encoded messages (`src/codec.rs`).

use std::{env, fmt::Write as _, fs, path::PathBuf};

use prost::Message as _;
use tonic_prost_build::{Config, FileDescriptorSet};

/// Field types and labels of descriptor.proto.
const TYPE_MESSAGE: i32 = 11;
const TYPES_OF_BYTES: [i32; 2] = [9, 12];
const LABEL_REPEATED: i32 = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["executor.proto", "gateway.proto", "stage.proto", "volume.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    fs::write(out.join("schema.rs"), schema(&descriptors)?)?;
    let mut config = Config::new();
    config.enable_type_names();
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::CheckedCodec")
        .compile_fds_with_config(descriptors, config)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}

/// The fields of every message, as a table in Rust.
fn schema(descriptors: &FileDescriptorSet) -> Result<String, std::fmt::Error> {
    let mut text = "static SCHEMA: &[Schema] = &[\n".to_owned();
    for file in &descriptors.file {
        for message in &file.message_type {
            writeln!(
                text,
                "Schema {{ name: {:?}, fields: &[",
                format!("{}.{}", file.package(), message.name())
            )?;
            for (index, field) in message.field.iter().enumerate() {
                let shape = match field.r#type.unwrap_or_default() {
                    TYPE_MESSAGE => {
                        format!("Shape::Message({:?})", field.type_name().trim_start_matches('.'))
                    }
                    kind if TYPES_OF_BYTES.contains(&kind) => "Shape::Bytes".to_owned(),
                    _ => "Shape::Number".to_owned(),
                };
                let (number, name) = (field.number(), field.name());
                let is_repeated = field.label == Some(LABEL_REPEATED);
                // Members of a oneof take each other's place.
                let oneof = |index: usize| message.field[index].oneof_index;
                let shares =
                    |other: &usize| oneof(index).is_some() && oneof(*other) == oneof(index);
                let slot = (0..index).find(shares).unwrap_or(index);
                assert!(
                    slot < 64,
                    "{} has more fields than the check of messages can tell apart",
                    message.name()
                );
                writeln!(
                    text,
                    "Field {{ number: {number}, name: {name:?}, is_repeated: {is_repeated}, \
                     slot: {slot}, shape: {shape} }},"
                )?;
            }
            text += "] },\n";
        }
    }
    Ok(text + "];\n")
}
