//! Documents that the authority's home gives to other gateways.

use std::collections::BTreeMap;
use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use zeroize::Zeroizing;

use super::message::Versions;

/// The longest document, in bytes.
pub(super) const DOCUMENT_MAX_BYTES: usize = 64 << 20;
/// Bytes of a document in one message. JSON writes up to six bytes for one.
const PART_MAX_BYTES: usize = 64 << 10;
/// Digits of a version.
const VERSION_DIGITS: usize = 32;

/// A document's content, which may hold secrets.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Content(pub(super) Zeroizing<String>);

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Content({} bytes)", self.0.len())
    }
}

impl Content {
    /// The version that this content is.
    pub(super) fn version(&self) -> String {
        let hash = digest(&SHA256, self.0.as_bytes());
        let hex = hash.as_ref().iter().map(|byte| format!("{byte:02x}"));
        hex.collect::<String>().chars().take(VERSION_DIGITS).collect()
    }

    /// A part from an offset on; `None`: no part begins there.
    pub(super) fn part(&self, offset: usize) -> Option<&str> {
        let rest = self.0.get(offset..)?;
        let mut end = rest.len().min(PART_MAX_BYTES);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        rest.get(..end)
    }
}

/// The documents of an authority at its home.
pub(super) struct Documents {
    pub(super) fingerprint: String,
    all: BTreeMap<String, (String, Content)>,
}

impl Documents {
    /// The documents by name, of the authority with this fingerprint.
    pub(super) fn new(fingerprint: String, all: BTreeMap<String, Content>) -> Self {
        let all = all.into_iter().map(|(name, content)| (name, (content.version(), content)));
        Self { fingerprint, all: all.collect() }
    }

    pub(super) fn versions(&self) -> Versions {
        self.all.iter().map(|(name, (version, _))| (name.clone(), version.clone())).collect()
    }

    /// A document, if this is its version.
    pub(super) fn get(&self, name: &str, version: &str) -> Option<&Content> {
        let (now, content) = self.all.get(name)?;
        (now == version).then_some(content)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn parts_make_up_the_document_and_another_document_is_another_version() {
        let text = "ä".repeat(PART_MAX_BYTES);
        let content = Content(Zeroizing::new(format!("x{text}")));
        let mut again = String::new();
        while again.len() < content.0.len() {
            let part = content.part(again.len()).unwrap();
            assert!((1..=PART_MAX_BYTES).contains(&part.len()));
            again.push_str(part);
        }
        assert!(again == *content.0);
        assert!(content.part(2).is_none() && content.part(again.len() + 1).is_none());
        let other = Content(Zeroizing::new(text));
        assert!(content.version() != other.version() && content.version().len() == VERSION_DIGITS);
    }
}
