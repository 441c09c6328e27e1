//! Messages that nobody of ours would send: made from a descriptor, so that no field
//! is forgotten, with the values that break things; or sound ones with some fields replaced.

use arbitrary::{Result, Unstructured};
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor,
    ReflectMessage as _, Value,
};

/// Messages inside of messages.
const MAX_DEPTH: u32 = 5;

/// Elements of a list, but seldom.
const FEW: usize = 3;

/// Elements of a list, seldom.
const MANY: usize = 300;

/// Bytes of a text, seldom.
const LONG: usize = 70_000;

/// Fields of a sound message that are replaced at most.
const MAX_CHANGES: usize = 4;

/// Fields that name programs: no random text, which might be one.
const PROGRAMS: &[&str] = &["program", "names"];

/// Words that mean something to who gets them.
const WORDS: &[&str] = &[
    "",
    "/",
    "..",
    "../../../../etc/shadow",
    "/proc/self/root/etc/shadow",
    "/proc/1/root",
    "/dev/fd/3",
    "a/../../b",
    "a\0b",
    "\u{202e}\n\u{7}",
    "logs",
    "true",
    "cat",
    "-rf",
    "f",
    ".",
    "%s%n",
    "LD_PRELOAD",
    "PATH",
    "user.name=*",
    ".git",
    crate::executor::MOUNT,
];

/// All messages of the contract.
pub fn pool() -> DescriptorPool {
    DescriptorPool::decode(posh_proto::DESCRIPTORS).expect("our own descriptors")
}

/// A message of that type: hostile through and through, or one of `sound` with some changes.
pub fn message(
    of: &MessageDescriptor,
    sound: &[DynamicMessage],
    source: &mut Unstructured<'_>,
) -> Result<DynamicMessage> {
    let like: Vec<&DynamicMessage> =
        sound.iter().filter(|message| message.descriptor() == *of).collect();
    if like.is_empty() || source.ratio(1, 8)? {
        return whole(of, source, MAX_DEPTH);
    }
    let mut message = (*source.choose(&like)?).clone();
    for _ in 0..source.int_in_range(0..=MAX_CHANGES)? {
        change(&mut message, source)?;
    }
    Ok(message)
}

fn whole(
    of: &MessageDescriptor,
    source: &mut Unstructured<'_>,
    depth: u32,
) -> Result<DynamicMessage> {
    let mut message = DynamicMessage::new(of.clone());
    for field in of.fields() {
        if !source.is_empty() && source.ratio(2, 3)? {
            message.set_field(&field, value(&field, source, depth)?);
        }
    }
    Ok(message)
}

/// Replaces one field, here or in a message inside.
fn change(message: &mut DynamicMessage, source: &mut Unstructured<'_>) -> Result<()> {
    let fields: Vec<FieldDescriptor> = message.descriptor().fields().collect();
    if fields.is_empty() {
        return Ok(());
    }
    let set: Vec<FieldDescriptor> = message.fields().map(|(field, _)| field).collect();
    let field = if set.is_empty() || source.ratio(1, 4)? {
        source.choose(&fields)?
    } else {
        source.choose(&set)?
    };
    let inner = match message.get_field_mut(field) {
        Value::Message(inner) => Some(inner),
        Value::List(list) if !list.is_empty() => {
            let at = source.choose_index(list.len())?;
            match &mut list[at] {
                Value::Message(inner) => Some(inner),
                other if source.ratio(1, 2)? => {
                    *other = scalar(&field.kind(), source, MAX_DEPTH)?;
                    return Ok(());
                }
                _ => None,
            }
        }
        _ => None,
    };
    match inner {
        Some(inner) if source.ratio(5, 6)? => change(inner, source),
        _ => {
            message.set_field(field, value(field, source, MAX_DEPTH)?);
            Ok(())
        }
    }
}

fn value(field: &FieldDescriptor, source: &mut Unstructured<'_>, depth: u32) -> Result<Value> {
    if field.is_map() {
        return Ok(Value::Map(std::collections::HashMap::<MapKey, Value>::new()));
    }
    if field.kind() == Kind::String && PROGRAMS.contains(&field.name()) {
        let word = Value::String((*source.choose(WORDS)?).to_owned());
        return Ok(if field.is_list() { Value::List(vec![word]) } else { word });
    }
    if !field.is_list() {
        return scalar(&field.kind(), source, depth);
    }
    // Many of little: many of much would be the fuzzer's own growth.
    let (count, depth) =
        if source.ratio(1, 40)? { (MANY, 0) } else { (source.int_in_range(0..=FEW)?, depth) };
    let one = scalar(&field.kind(), source, depth)?;
    let mut list = vec![one; count];
    for other in list.iter_mut().take(FEW).skip(1) {
        *other = scalar(&field.kind(), source, depth)?;
    }
    Ok(Value::List(list))
}

fn scalar(kind: &Kind, source: &mut Unstructured<'_>, depth: u32) -> Result<Value> {
    Ok(match kind {
        Kind::Message(of) if depth == 0 => Value::Message(DynamicMessage::new(of.clone())),
        Kind::Message(of) => Value::Message(whole(of, source, depth - 1)?),
        Kind::Bool => Value::Bool(source.arbitrary()?),
        Kind::String => Value::String(String::from_utf8_lossy(&text(source)?).into_owned()),
        Kind::Bytes => Value::Bytes(text(source)?.into()),
        Kind::Enum(_) => {
            Value::EnumNumber(i32::try_from(number(source)? as i64 & 0x1f).unwrap_or(-1))
        }
        Kind::Double => Value::F64(*source.choose(&[0.0, -1.0, f64::NAN, f64::INFINITY, 1e300])?),
        Kind::Float => Value::F32(*source.choose(&[0.0, -1.0, f32::NAN, f32::INFINITY, 1e30])?),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(number(source)? as i32),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(number(source)? as i64),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(number(source)? as u32),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(number(source)?),
    })
}

fn number(source: &mut Unstructured<'_>) -> Result<u64> {
    const EDGES: &[u64] = &[
        0,
        1,
        2,
        3,
        64,
        65,
        1000,
        1001,
        0o22,
        0xffff,
        1 << 31,
        u32::MAX as u64,
        1 << 32,
        1 << 62,
        1 << 63,
        u64::MAX,
    ];
    if source.ratio(3, 4)? { Ok(*source.choose(EDGES)?) } else { source.arbitrary() }
}

fn text(source: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    if source.ratio(1, 60)? {
        return Ok(vec![b'x'; LONG]);
    }
    if source.ratio(3, 4)? {
        return Ok(source.choose(WORDS)?.as_bytes().to_vec());
    }
    let length = source.int_in_range(0..=40)?;
    Ok(source.bytes(length.min(source.len()))?.to_vec())
}
