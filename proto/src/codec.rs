//! Checks encoded messages before they are decoded. An element of a repeated field takes two bytes
//! on the wire and up to some hundred in memory, so that a message's size says little about the
//! memory that decoding takes. [`check`] walks the raw bytes with the contract's table of fields,
//! counts the elements of each repeated field over the whole message, and refuses a message with
//! more than `MOST` allows. It allocates one number for each bounded field.
//!
//! A decoded message shares the memory of its encoded form, including parts that decoding drops. So
//! a message of a run or a volume must have no such parts, whoever sends it: unknown fields, and
//! second occurrences of fields that are not repeated, are refused (`EXACT`).
//!
//! The two tables of this file have the largest size and the bounds of every message that a server
//! receives or sends; a repeated field without an entry has the common bound.

use std::{any, collections::HashMap, marker::PhantomData, sync::OnceLock};

use bytes::Buf as _;
use prost::{Message, Name};
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};
use tonic_prost::ProstEncoder;

use crate::MAX_MESSAGE_BYTES;

include!(concat!(env!("OUT_DIR"), "/schema.rs"));

/// A specification on the wire, deflated or not: what ten thousand names deflate to, with room.
pub const SPECIFICATION_BYTES: usize = 256 << 10;

/// A specification once inflated: twice the kernel's usual limit for the words of a command,
/// since paths stand among the words and among the paths.
pub const INFLATED_BYTES: usize = 4 << 20;

/// Bytes of a message beside its content: tags, lengths, and the ids of a chunk.
const ENVELOPE_BYTES: usize = 1 << 10;

/// The largest message of an executor's service: a specification, or a chunk of an inlet, which a
/// gateway reads from its stage in pieces of 256 KiB.
pub const RUN_BYTES: usize = SPECIFICATION_BYTES + ENVELOPE_BYTES;

/// The largest message of a volume's service: one request's worth of contents has 2 MiB, and a
/// last write of 1 MiB may exceed it.
pub const VOLUME_BYTES: usize = 4 << 20;

/// A token and a signing request: some 300 bytes.
pub const ENROLMENT_BYTES: usize = 64 << 10;

/// Levels of messages within messages; the contract has seven.
const DEEPEST: usize = 16;

/// Entries of a directory in one fingerprint.
pub const FINGERPRINTS: usize = 64;

/// Directories of which one stage's end may tell that something changed in them.
pub const MOST_CHANGED_DIRECTORIES: usize = 4096;

/// Bound of a repeated field that is not in [`MOST`].
const MOST_OF_OTHERS: usize = 1024;

/// A message of a volume's session to a workstation: a listing has 8,192 entries, an answer about
/// paths as many as there are names in 256 of them.
pub const VOLUME_ANSWER_BYTES: usize = 16 << 20;

/// A table of an executor's tools, with a version of 256 characters each; or its description.
const TABLE_BYTES: usize = 4 << 20;

/// The first message of a command to the gateway: its words and variables, at most 6 MiB by the
/// kernel's limit (execve(2)), and its descriptors.
pub const ENLISTMENT_BYTES: usize = 8 << 20;

/// Largest size of each message that servers receive or send, and of each message to the stage
/// socket of a gateway, whose sender may have fewer rights than the gateway's user. Messages to the
/// user's own programs are not listed, and not checked.
const LARGEST: &[(&str, usize)] = &[
    ("posh.executor.v1.RunInput", RUN_BYTES),
    ("posh.executor.v1.RunSpec", INFLATED_BYTES),
    ("posh.executor.v1.DescribeRequest", ENVELOPE_BYTES),
    ("posh.executor.v1.StatusRequest", ENVELOPE_BYTES),
    ("posh.executor.v1.ToolsRequest", SPECIFICATION_BYTES),
    ("posh.executor.v1.FingerprintRequest", ENROLMENT_BYTES),
    ("posh.executor.v1.EnrolRequest", ENROLMENT_BYTES),
    ("posh.executor.v1.RenewRequest", ENROLMENT_BYTES),
    ("posh.volume.v1.ToVolume", 1 << 20),
    ("posh.volume.v1.ReadRequest", 1 << 20),
    ("posh.volume.v1.WriteRequest", VOLUME_BYTES),
    ("posh.executor.v1.RunOutput", MAX_MESSAGE_BYTES),
    ("posh.executor.v1.DescribeReply", TABLE_BYTES),
    ("posh.executor.v1.ToolsReply", TABLE_BYTES),
    ("posh.executor.v1.FingerprintReply", TABLE_BYTES),
    ("posh.executor.v1.StatusReply", ENROLMENT_BYTES),
    ("posh.executor.v1.IssuedCertificate", ENROLMENT_BYTES),
    ("posh.volume.v1.FromVolume", VOLUME_ANSWER_BYTES),
    ("posh.volume.v1.ReadReply", VOLUME_BYTES),
    ("posh.volume.v1.WriteReply", VOLUME_BYTES),
    ("posh.stage.v1.ToGateway", ENLISTMENT_BYTES),
];

/// Messages that must not contain parts that decoding drops. Both sides have the same version of
/// the contract by then, since a gateway calls Describe first. Describe, Status and enrolment
/// accept other versions, and their messages are small.
const EXACT: &[&str] = &[
    "posh.executor.v1.RunInput",
    "posh.executor.v1.RunSpec",
    "posh.executor.v1.ToolsRequest",
    "posh.executor.v1.FingerprintRequest",
    "posh.volume.v1.ToVolume",
    "posh.volume.v1.ReadRequest",
    "posh.volume.v1.WriteRequest",
    "posh.executor.v1.RunOutput",
    "posh.executor.v1.ToolsReply",
    "posh.executor.v1.FingerprintReply",
    "posh.volume.v1.FromVolume",
    "posh.volume.v1.ReadReply",
    "posh.volume.v1.WriteReply",
];

/// Elements of repeated fields in one message, over all that contain them. Each bound is a small
/// multiple of the most that a gateway sends, and small enough that all of them at once decode to
/// less than 64 MiB.
const MOST: &[(&str, &str, usize)] = &[
    // A mount table has some ten.
    ("posh.executor.v1.RunSpec", "mounts", 256),
    ("posh.executor.v1.RunSpec", "client_files", 64),
    ("posh.executor.v1.RunSpec", "volumes", 256),
    // As many as an executor joins in one run.
    ("posh.executor.v1.RunSpec", "stages", 4096),
    ("posh.executor.v1.RunSpec", "pipes", 12_288),
    ("posh.executor.v1.RunSpec", "ptys", 256),
    // A pipeline of a shell has some ten commands, and three streams each.
    ("posh.executor.v1.RunSpec", "merges", 1024),
    ("posh.executor.v1.RunSpec", "inlets", 1024),
    ("posh.executor.v1.RunSpec", "outlets", 1024),
    ("posh.executor.v1.Merge", "sources", 8192),
    ("posh.executor.v1.Outlet", "sources", 8192),
    // Words: as many as two bytes each in the kernel's usual limit of 2 MiB would be a million;
    // real ones have ten or more.
    ("posh.executor.v1.Stage", "argv", 131_072),
    ("posh.executor.v1.Stage", "paths", 131_072),
    ("posh.executor.v1.Stage", "env", 16_384),
    ("posh.executor.v1.Stage", "descriptors", 8192),
    ("posh.executor.v1.Stage", "limits", 16_384),
    ("posh.executor.v1.Stage", "guards", 8192),
    ("posh.executor.v1.Stage", "watched_trees", 16_384),
    ("posh.executor.v1.Stage", "covered", 65_536),
    ("posh.executor.v1.Stage", "owners_of", 16_384),
    ("posh.executor.v1.Stage", "attributes_of", 16_384),
    ("posh.executor.v1.WatchedTree", "up_to", 16_384),
    ("posh.executor.v1.WatchedTree", "only", 16_384),
    ("posh.executor.v1.WatchedTree", "grows", 16_384),
    ("posh.executor.v1.WatchedTree", "own", 16_384),
    ("posh.executor.v1.Guard", "files", 16_384),
    ("posh.executor.v1.Guard", "settings", 16_384),
    ("posh.executor.v1.Guard", "sha256", 16_384),
    // A gateway asks for all commands that it knows.
    ("posh.executor.v1.ToolsRequest", "names", 4096),
    // Leases that a table of files gives back when it is full.
    ("posh.executor.v1.VolumeSession", "returned", 16_384),
    ("posh.volume.v1.ReturnLeases", "leases", 16_384),
    // Those of a signal for each key press, in a run that lasts.
    ("posh.executor.v1.Resume", "signals", 16_384),
    ("posh.executor.v1.Resume", "credits", 8192),
    ("posh.executor.v1.Resume", "closed", 8192),
    ("posh.executor.v1.Resume", "ended", 8192),
    // PATH_MAX has at most 2048 names.
    ("posh.volume.v1.Walk", "names", 4096),
    // NGROUPS_MAX.
    ("posh.volume.v1.Caller", "groups", 65_536),
    ("posh.volume.v1.ReadRequest", "parts", 16_384),
    ("posh.volume.v1.EndSessions", "names", 256),
    // New files of one request are at most 2048, and writes at most as many as fit beside their
    // data.
    ("posh.volume.v1.WriteRequest", "writes", 16_384),
    ("posh.volume.v1.Put", "path", 131_072),
    // The following are sent by servers. All locales of glibc are some 900.
    ("posh.executor.v1.DescribeReply", "locales", 16_384),
    ("posh.executor.v1.DescribeReply", "catalogs", 16_384),
    ("posh.executor.v1.DescribeReply", "exports", 16_384),
    ("posh.executor.v1.ToolsReply", "tools", 4096),
    ("posh.executor.v1.FingerprintReply", "entries", FINGERPRINTS),
    ("posh.executor.v1.Started", "written_files", 8192),
    ("posh.executor.v1.RunTimes", "outlets", 8192),
    ("posh.executor.v1.Exited", "offsets", 8192),
    // As many as volumes of a specification.
    ("posh.executor.v1.Exited", "volume_marks", 256),
    ("posh.executor.v1.Exited", "files_now", 16_384),
    // What one call made, removed or renamed, and the directories around it.
    ("posh.volume.v1.Entries", "entries", 1024),
    // An executor looks at 500,000 names, and tells of 4,096 directories.
    ("posh.executor.v1.Exited", "changed_directories", MOST_CHANGED_DIRECTORIES),
    ("posh.executor.v1.ChangedDirectory", "written", NAMES),
    ("posh.executor.v1.ChangedDirectory", "removed", NAMES),
    ("posh.executor.v1.ChangedDirectory", "written_now", NAMES),
    ("posh.executor.v1.ChangedDirectory", "kinds", NAMES),
    // As many as names of `Names`, of `Listing` (its limit), and of an attribute list of 64 KiB.
    ("posh.volume.v1.Walked", "entries", 65_536),
    ("posh.volume.v1.Listing", "names", 8192),
    ("posh.volume.v1.Stamped", "values", 65_536),
    // A part of `ReadRequest` comes as bytes and an end.
    ("posh.volume.v1.ReadReply", "pieces", 32_768),
    ("posh.volume.v1.WriteReply", "results", 16_384),
    // The following are sent by commands. A word takes two bytes and a pointer of the kernel's
    // usual limit of 2 MiB.
    ("posh.stage.v1.Enlist", "argv", WORDS),
    ("posh.stage.v1.Enlist", "env", WORDS),
    ("posh.stage.v1.Question", "argv", WORDS),
    ("posh.stage.v1.Enlist", "descriptors", 65_536),
    ("posh.stage.v1.Question", "writes", 65_536),
    // RLIM_NLIMITS is 16.
    ("posh.stage.v1.Enlist", "limits", 64),
];

/// Words of a command on a workstation.
const WORDS: usize = 262_144;

/// Names in directories that a command has changed.
const NAMES: usize = 524_288;

/// A message of the contract.
#[derive(Debug)]
struct Schema {
    name: &'static str,
    fields: &'static [Field],
}

#[derive(Debug)]
struct Field {
    number: u64,
    name: &'static str,
    is_repeated: bool,
    /// Bit of the field in its message's set; one for all members of a oneof.
    slot: u32,
    shape: Shape,
}

#[derive(Debug)]
enum Shape {
    Number,
    Bytes,
    Message(&'static str),
}

/// Reason why a message is not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It has too many bytes.
    #[error("the message has {size} bytes, and may have {largest}")]
    Large {
        /// Its bytes.
        size: usize,
        /// Its bound.
        largest: usize,
    },
    /// A repeated field has too many elements.
    #[error("the message has more than {most} `{field}` of {message}")]
    Many {
        /// The message that has the field.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// Its bound.
        most: usize,
    },
    /// It has a field that the contract does not have.
    #[error("{message} has no field {number} in this version of posh")]
    Unknown {
        /// The message.
        message: &'static str,
        /// The field's number.
        number: u64,
    },
    /// A field that is not repeated comes twice, or two members of a oneof.
    #[error("the message has `{field}` of {message} twice")]
    Twice {
        /// The message that has the field.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// It is no message of the contract.
    #[error("the message is malformed")]
    Malformed,
}

/// Checks the encoded bytes of the message `name`.
///
/// # Errors
/// [`Unfit`] if it must not be decoded.
pub fn check(name: &str, bytes: &[u8]) -> Result<(), Unfit> {
    let Some((_, largest)) = LARGEST.iter().find(|(known, _)| *known == name) else {
        return Ok(());
    };
    if bytes.len() > *largest {
        return Err(Unfit::Large { size: bytes.len(), largest: *largest });
    }
    let Some(schema) = schema(name) else { return Ok(()) };
    Check { is_exact: EXACT.contains(&name), ..Check::default() }.message(schema, bytes, 0)
}

fn schema(name: &str) -> Option<&'static Schema> {
    static BY_NAME: OnceLock<HashMap<&'static str, &'static Schema>> = OnceLock::new();
    BY_NAME
        .get_or_init(|| SCHEMA.iter().map(|schema| (schema.name, schema)).collect())
        .get(name)
        .copied()
}

fn most(message: &str, field: &str) -> usize {
    static BY_FIELD: OnceLock<HashMap<(&'static str, &'static str), usize>> = OnceLock::new();
    let most = BY_FIELD.get_or_init(|| {
        MOST.iter().map(|(message, field, most)| ((*message, *field), *most)).collect()
    });
    most.get(&(message, field)).copied().unwrap_or(MOST_OF_OTHERS)
}

#[derive(Default)]
struct Check {
    /// See [`EXACT`].
    is_exact: bool,
    /// Elements seen so far, by message and number of the field.
    elements: HashMap<(&'static str, u64), usize>,
}

impl Check {
    fn message(
        &mut self,
        schema: &'static Schema,
        mut rest: &[u8],
        depth: usize,
    ) -> Result<(), Unfit> {
        if depth > DEEPEST {
            return Err(Unfit::Malformed);
        }
        let mut present = 0_u64;
        while !rest.is_empty() {
            let key = varint(&mut rest)?;
            let content = content(&mut rest, key & 7)?;
            let Some(field) = schema.fields.iter().find(|field| field.number == key >> 3) else {
                if self.is_exact {
                    return Err(Unfit::Unknown { message: schema.name, number: key >> 3 });
                }
                continue;
            };
            if field.is_repeated {
                self.add(schema, field, elements(field, content))?;
            } else if self.is_exact && present & 1 << field.slot != 0 {
                return Err(Unfit::Twice { message: schema.name, field: field.name });
            } else {
                present |= 1 << field.slot;
            }
            if let (Shape::Message(name), Some(content)) = (&field.shape, content)
                && let Some(inner) = self::schema(name)
            {
                self.message(inner, content, depth + 1)?;
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        schema: &'static Schema,
        field: &'static Field,
        count: usize,
    ) -> Result<(), Unfit> {
        let seen = self.elements.entry((schema.name, field.number)).or_default();
        *seen = seen.saturating_add(count);
        let most = most(schema.name, field.name);
        if *seen > most {
            return Err(Unfit::Many { message: schema.name, field: field.name, most });
        }
        Ok(())
    }
}

/// Number of elements in one occurrence: several numbers may be packed into it.
fn elements(field: &Field, content: Option<&[u8]>) -> usize {
    match (&field.shape, content) {
        // A number of fixed size has four bytes or eight, so that this may count too many, never
        // too few. An empty field is a byte or two that decoding drops.
        (Shape::Number, Some(packed)) => packed.iter().filter(|byte| **byte < 0x80).count().max(1),
        _ => 1,
    }
}

/// Skips a field's content; returns it if it is length-delimited.
fn content<'a>(rest: &mut &'a [u8], wire_type: u64) -> Result<Option<&'a [u8]>, Unfit> {
    let length = match wire_type {
        0 => {
            varint(rest)?;
            return Ok(None);
        }
        1 => 8,
        2 => usize::try_from(varint(rest)?).map_err(|_| Unfit::Malformed)?,
        5 => 4,
        // Groups: the contract has none, and no peer of this version sends one.
        _ => return Err(Unfit::Malformed),
    };
    let (content, after) = rest.split_at_checked(length).ok_or(Unfit::Malformed)?;
    *rest = after;
    Ok((wire_type == 2).then_some(content))
}

fn varint(rest: &mut &[u8]) -> Result<u64, Unfit> {
    prost::encoding::decode_varint(rest).map_err(|_| Unfit::Malformed)
}

/// prost's codec, with [`check`] before decoding.
#[derive(Debug, Clone)]
pub struct CheckedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CheckedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CheckedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Name + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = CheckedEncoder<T>;
    type Decoder = CheckedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        CheckedEncoder(ProstEncoder::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        CheckedDecoder { name: U::full_name(), _decoded: PhantomData }
    }
}

/// prost's encoder.
#[derive(Debug, Clone)]
pub struct CheckedEncoder<T>(ProstEncoder<T>);

impl<T: Message> Encoder for CheckedEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // Otherwise the buffer doubles as it grows.
        buffer.reserve(item.encoded_len());
        self.0.encode(item, buffer)
    }
}

/// prost's decoder, after the check.
#[derive(Debug, Clone)]
pub struct CheckedDecoder<U> {
    name: String,
    _decoded: PhantomData<U>,
}

impl<U: Message + Default> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // tonic collects a whole message in one chunk before it is decoded.
        if source.chunk().len() < source.remaining() {
            return Err(Status::internal(format!("a {} in pieces", any::type_name::<U>())));
        }
        check(&self.name, source.chunk()).map_err(|unfit| match unfit {
            Unfit::Large { .. } | Unfit::Many { .. } => {
                Status::resource_exhausted(unfit.to_string())
            }
            _ => Status::invalid_argument(unfit.to_string()),
        })?;
        U::decode(source).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{RunInput, RunSpec, Stage, run_input::Kind};

    const RUN: &str = "posh.executor.v1.RunInput";

    fn input(spec: RunSpec) -> Vec<u8> {
        RunInput { kind: Some(Kind::Spec(spec)) }.encode_to_vec()
    }

    #[test]
    fn what_gateways_send_passes() {
        let argv = (0..10_000).map(|file| format!("worker-{file:05}.log").into()).collect();
        let spec =
            RunSpec { stages: vec![Stage { argv, ..Stage::default() }], ..RunSpec::default() };
        assert_eq!(check(RUN, &input(spec)), Ok(()));
    }

    #[test]
    fn empty_messages_without_end_are_not_decoded() {
        for (field, name) in [(3, "mounts"), (4, "stages"), (10, "client_files")] {
            let spec = [field << 3 | 2, 0].repeat(20_000);
            let mut message = vec![10];
            prost::encoding::encode_varint(spec.len() as u64, &mut message);
            message.extend(spec);
            assert!(
                matches!(check(RUN, &message), Err(Unfit::Many { field, .. }) if field == name),
                "{name}"
            );
        }
    }

    /// Empty elements of a repeated field, by the numbers of the fields that lead to it.
    fn many(fields: &[u8]) -> Vec<u8> {
        let (repeated, around) = fields.split_last().unwrap();
        let elements = [repeated << 3 | 2, 0].repeat(100_000);
        around.iter().rev().fold(elements, |inner, field| {
            let mut message = vec![field << 3 | 2];
            prost::encoding::encode_varint(inner.len() as u64, &mut message);
            message.extend(inner);
            message
        })
    }

    #[test]
    fn what_servers_send_is_measured_too() {
        let sent: [(&str, &[u8]); 5] = [
            ("posh.executor.v1.RunOutput", &[7, 5]),
            ("posh.executor.v1.RunOutput", &[7, 9]),
            ("posh.executor.v1.ToolsReply", &[1]),
            ("posh.volume.v1.FromVolume", &[2, 3, 4, 2]),
            ("posh.volume.v1.ReadReply", &[1]),
        ];
        for (name, fields) in sent {
            assert!(
                matches!(check(name, &many(fields)), Err(Unfit::Many { .. })),
                "{name} {fields:?}"
            );
        }
    }

    #[test]
    fn what_a_command_says_of_itself_is_measured_too() {
        for fields in [&[1, 6], &[1, 7], &[1, 10], &[1, 13], &[11, 3]] {
            let most = if fields[1] == 13 { 64 } else { WORDS };
            let mut message = vec![fields[0] << 3 | 2];
            let elements = [fields[1] << 3 | 2, 0].repeat(most + 1);
            prost::encoding::encode_varint(elements.len() as u64, &mut message);
            message.extend(elements);
            assert!(
                matches!(check("posh.stage.v1.ToGateway", &message), Err(Unfit::Many { .. })),
                "{fields:?}"
            );
        }
        // As many words as the kernel takes.
        let argv = vec![bytes::Bytes::from_static(b"x"); (2 << 20) / 10];
        let enlist = crate::stage::Enlist { argv, ..Default::default() };
        let kind = Some(crate::stage::to_gateway::Kind::Enlist(enlist));
        assert_eq!(
            check("posh.stage.v1.ToGateway", &crate::stage::ToGateway { kind }.encode_to_vec()),
            Ok(())
        );
    }

    /// Divided among messages that contain them, or among occurrences of one field.
    #[test]
    fn elements_are_counted_over_the_whole_message() {
        let stage = Stage { descriptors: vec![Default::default(); 100], ..Stage::default() };
        let spec = RunSpec { stages: vec![stage; 100], ..RunSpec::default() };
        assert!(matches!(check(RUN, &input(spec)), Err(Unfit::Many { field: "descriptors", .. })));
        let one =
            RunSpec { mounts: vec![Default::default(); 200], ..RunSpec::default() }.encode_to_vec();
        let spec = "posh.executor.v1.RunSpec";
        assert_eq!(check(spec, &one), Ok(()));
        assert!(matches!(check(spec, &one.repeat(2)), Err(Unfit::Many { field: "mounts", .. })));
        let pipes = input(RunSpec { pipes: (0..20_000).collect(), ..RunSpec::default() });
        assert!(matches!(check(RUN, &pipes), Err(Unfit::Many { field: "pipes", .. })));
    }

    #[test]
    fn what_is_too_large_or_malformed_is_not_decoded() {
        let large = input(RunSpec { run_id: "x".repeat(300 << 10), ..RunSpec::default() });
        assert!(matches!(check(RUN, &large), Err(Unfit::Large { .. })));
        for malformed in [&[10, 200][..], &[11, 12], &[0x80; 12], &[9, 0]] {
            assert_eq!(check(RUN, malformed), Err(Unfit::Malformed), "{malformed:?}");
        }
    }

    #[test]
    fn messages_of_runs_and_volumes_have_nothing_that_decoding_drops() {
        let unknown = [0xFA, 0x3F, 1, 0];
        // Those that are open to other versions, or come from the user's own commands.
        let others = ["Describe", "Status", "Enrol", "Renew", "Issued", "ToGateway"];
        let is_other = |name: &str| others.iter().any(|other| name.contains(other));
        for (name, _) in LARGEST.iter().filter(|(name, _)| !is_other(name)) {
            assert!(
                matches!(check(name, &unknown), Err(Unfit::Unknown { number: 1023, .. })),
                "{name}"
            );
        }
        // Open to other versions.
        assert_eq!(check("posh.executor.v1.DescribeRequest", &unknown), Ok(()));
        // Also further in.
        let hello = [10, 4].iter().chain(&unknown).copied().collect::<Vec<_>>();
        assert!(matches!(check("posh.volume.v1.ToVolume", &hello), Err(Unfit::Unknown { .. })));
        let read = "posh.volume.v1.ReadRequest";
        assert_eq!(check(read, &[10, 1, 7]), Ok(()));
        assert!(matches!(
            check(read, &[10, 1, 7, 10, 1, 7]),
            Err(Unfit::Twice { field: "session", .. })
        ));
        // Two members of a oneof.
        let twice =
            [input(RunSpec::default()), RunInput { kind: Some(Kind::End(1)) }.encode_to_vec()]
                .concat();
        assert!(matches!(check(RUN, &twice), Err(Unfit::Twice { .. })));
        // Packed numbers without any.
        let groups = [26, 0].repeat(65_537);
        let mut request = vec![18];
        prost::encoding::encode_varint(groups.len() as u64, &mut request);
        request.extend(groups);
        assert!(matches!(check(read, &request), Err(Unfit::Many { field: "groups", .. })));
    }

    #[test]
    fn every_repeated_field_has_a_bound_and_every_bound_a_field() {
        fn reach(name: &'static str, found: &mut Vec<&'static Schema>) {
            let schema = schema(name).unwrap();
            if found.iter().any(|known| known.name == name) {
                return;
            }
            found.push(schema);
            for field in schema.fields {
                if let Shape::Message(inner) = field.shape {
                    reach(inner, found);
                }
            }
        }
        let mut reached = Vec::new();
        LARGEST.iter().for_each(|(name, _)| reach(name, &mut reached));
        let mut unbounded = Vec::new();
        for schema in &reached {
            for field in schema.fields.iter().filter(|field| field.is_repeated) {
                let largest = match schema.name {
                    "posh.executor.v1.ChangedDirectory" => NAMES,
                    "posh.stage.v1.Enlist" | "posh.stage.v1.Question" => WORDS,
                    _ => 131_072,
                };
                let is_listed = MOST
                    .iter()
                    .any(|(message, name, _)| (*message, *name) == (schema.name, field.name));
                let is_bounded = is_listed && most(schema.name, field.name) <= largest;
                unbounded.extend((!is_bounded).then(|| format!("{}.{}", schema.name, field.name)));
            }
        }
        assert!(unbounded.is_empty(), "fields without a bound of their own: {unbounded:#?}");
        for (message, field, _) in MOST {
            let schema = reached.iter().find(|schema| schema.name == *message);
            let known =
                schema.is_some_and(|s| s.fields.iter().any(|f| f.name == *field && f.is_repeated));
            assert!(
                known,
                "{message}.{field} stands in the table, and is nothing that is measured"
            );
        }
    }
}
