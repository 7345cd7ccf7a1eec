//! The protocol on the first stream of a connection: the preamble, the steps of admission, messages.
//!
//! ```text
//! dials                                    accepts
//!   preamble: magic, versions MIN..MAX -->
//!                                      <-- preamble
//!   Start: method, token id, CPace Ya  -->
//!                                      <-- Share: CPace Yb
//!   Proof: CPace tag                   -->
//!                                      <-- Accept: CPace tag; Ready (with the secret, to a joiner)
//!   Ready; Joined (a joiner)           -->
//! side with the lower peer id: Use
//! ```
//!
//! The preamble is 16 bytes and never changes. Everything else is framed: a length in 4 bytes, big
//! endian, and that many bytes.

use std::ops::RangeInclusive;

use quinn::{ConnectionError, ReadExactError, RecvStream, SendStream};
use weft_crypto::{CPACE_SHARE_LEN, CPACE_TAG_LEN};
use zeroize::Zeroizing;

use crate::error::Failure;
use crate::limits::{HELLO_MAX_BYTES, NICKNAME_MAX_BYTES, SECRET_MAX_BYTES};
use crate::secret::Secret;
use crate::token::TokenId;

pub(crate) const PREAMBLE_LEN: usize = 16;
const MAGIC: &[u8; 8] = b"WEFTLINK";

/// Longest frame before the proof.
pub(crate) const UNPROVEN_MAX_BYTES: usize = 128;
/// Longest frame of admission.
pub(crate) const ADMISSION_MAX_BYTES: usize =
    HELLO_MAX_BYTES + NICKNAME_MAX_BYTES + SECRET_MAX_BYTES + 64;

/// Longest decision.
pub(crate) const DECISION_MAX_BYTES: usize = 32;

/// How a host proves that it belongs to the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Password,
    Token(TokenId),
}

/// One step of admission.
#[derive(Debug)]
pub(crate) enum Step {
    Start { method: Method, share: [u8; CPACE_SHARE_LEN] },
    Share([u8; CPACE_SHARE_LEN]),
    Proof([u8; CPACE_TAG_LEN]),
    Accept([u8; CPACE_TAG_LEN]),
    Ready(Ready),
    Joined,
    Use(Decision),
}

/// The decision that the connection is the link from now on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decision {
    /// Later decisions have higher numbers.
    pub(crate) order: u64,
    /// The session of both hosts that continues on this connection; `None` for a fresh start. One
    /// side decides, since either may have taken another connection after reporting its session.
    pub(crate) renews: Option<u64>,
}

/// A host's statement about itself, once both have proven that they belong together.
#[derive(Debug)]
pub(crate) struct Ready {
    /// Random per start of the daemon.
    pub(crate) instance: u64,
    /// The instance that ran on this machine before and has ended.
    pub(crate) succeeds: Option<u64>,
    /// The session that this host already has with the other one.
    pub(crate) current: Option<u64>,
    pub(crate) nickname: String,
    /// The application's hello, as JSON.
    pub(crate) hello: Vec<u8>,
    /// The network's secret, for a host that joins by token.
    pub(crate) secret: Option<Secret>,
}

impl Step {
    pub(crate) fn encode(&self) -> Zeroizing<Vec<u8>> {
        let capacity = match self {
            Self::Ready(ready) => {
                64 + ready.nickname.len()
                    + ready.hello.len()
                    + ready.secret.as_ref().map_or(0, |secret| secret.expose().len())
            }
            _ => UNPROVEN_MAX_BYTES,
        };
        let mut out = Zeroizing::new(Vec::with_capacity(capacity));
        match self {
            Self::Start { method, share } => {
                out.push(1);
                match method {
                    Method::Password => out.extend_from_slice(&[1, 0, 0, 0, 0]),
                    Method::Token(id) => {
                        out.push(2);
                        out.extend_from_slice(id);
                    }
                }
                out.extend_from_slice(share);
            }
            Self::Share(share) => tagged(&mut out, 2, share),
            Self::Proof(tag) => tagged(&mut out, 3, tag),
            Self::Accept(tag) => tagged(&mut out, 4, tag),
            Self::Ready(ready) => ready.encode(&mut out),
            Self::Joined => out.push(6),
            Self::Use(Decision { order, renews }) => {
                tagged(&mut out, 7, &order.to_be_bytes());
                optional(&mut out, *renews);
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let step = match reader.array::<1>()? {
            [1] => {
                let [method] = reader.array()?;
                let id = reader.array()?;
                let method = match method {
                    1 => Method::Password,
                    2 => Method::Token(id),
                    _ => return None,
                };
                Self::Start { method, share: reader.array()? }
            }
            [2] => Self::Share(reader.array()?),
            [3] => Self::Proof(reader.array()?),
            [4] => Self::Accept(reader.array()?),
            [5] => Self::Ready(Ready::decode(&mut reader)?),
            [6] => Self::Joined,
            [7] => Self::Use(Decision {
                order: u64::from_be_bytes(reader.array()?),
                renews: reader.optional()?,
            }),
            _ => return None,
        };
        reader.0.is_empty().then_some(step)
    }
}

impl Ready {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(5);
        out.extend_from_slice(&self.instance.to_be_bytes());
        optional(out, self.succeeds);
        optional(out, self.current);
        let secret = self.secret.as_ref().map_or(&[][..], Secret::expose);
        for part in [self.nickname.as_bytes(), &self.hello, secret] {
            out.extend_from_slice(&(part.len() as u32).to_be_bytes());
            out.extend_from_slice(part);
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        let instance = u64::from_be_bytes(reader.array()?);
        let succeeds = reader.optional()?;
        let current = reader.optional()?;
        let nickname = reader.part(NICKNAME_MAX_BYTES)?;
        let nickname = crate::error::clean(std::str::from_utf8(nickname).ok()?);
        let hello = reader.part(HELLO_MAX_BYTES)?.to_vec();
        let secret = match reader.part(SECRET_MAX_BYTES)? {
            [] => None,
            secret => Some(Secret::new(secret.to_vec()).ok()?),
        };
        Some(Self { instance, succeeds, current, nickname, hello, secret })
    }
}

fn tagged(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag);
    out.extend_from_slice(bytes);
}

/// The id of a session or an instance; 0 means none.
fn optional(out: &mut Vec<u8>, id: Option<u64>) {
    out.extend_from_slice(&id.unwrap_or(0).to_be_bytes());
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn optional(&mut self) -> Option<Option<u64>> {
        let id = u64::from_be_bytes(self.array()?);
        Some((id != 0).then_some(id))
    }

    fn part(&mut self, max: usize) -> Option<&'a [u8]> {
        let len = u32::from_be_bytes(self.array()?) as usize;
        if len > max {
            return None;
        }
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }
}

/// The preamble of a host that supports these versions.
pub(crate) fn preamble(versions: &RangeInclusive<u16>) -> [u8; PREAMBLE_LEN] {
    let mut bytes = [0; PREAMBLE_LEN];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..10].copy_from_slice(&versions.start().to_be_bytes());
    bytes[10..12].copy_from_slice(&versions.end().to_be_bytes());
    bytes
}

/// The versions in a peer's preamble; the reserved bytes are ignored.
pub(crate) fn versions_of(preamble: &[u8; PREAMBLE_LEN]) -> Option<RangeInclusive<u16>> {
    let mut reader = Reader(preamble);
    if &reader.array::<8>()? != MAGIC {
        return None;
    }
    let min = u16::from_be_bytes(reader.array()?);
    let max = u16::from_be_bytes(reader.array()?);
    (min <= max).then_some(min..=max)
}

/// The newest version in both ranges.
pub(crate) fn common_version(a: &RangeInclusive<u16>, b: &RangeInclusive<u16>) -> Option<u16> {
    let newest = *a.end().min(b.end());
    (newest >= *a.start().max(b.start())).then_some(newest)
}

/// The reason why no frame came.
#[derive(Debug)]
pub(crate) enum FrameError {
    /// The peer has sent everything.
    End,
    /// Longer than allowed, or truncated.
    Bad(&'static str),
    Lost(ConnectionError),
}

impl FrameError {
    /// `ended` says what the end of the connection means.
    pub(crate) fn into_failure(self, ended: impl FnOnce(&ConnectionError) -> Failure) -> Failure {
        match self {
            Self::End => Failure::protocol("the peer ended admission early"),
            Self::Bad(reason) => Failure::protocol(reason),
            Self::Lost(error) => ended(&error),
        }
    }
}

/// Sends one frame.
pub(crate) async fn write_frame(
    send: &mut SendStream,
    bytes: &[u8],
) -> Result<(), quinn::WriteError> {
    send.write_all(&(bytes.len() as u32).to_be_bytes()).await?;
    send.write_all(bytes).await
}

/// Receives one frame of at most `max` bytes. Must not be cancelled between frames.
pub(crate) async fn read_frame(recv: &mut RecvStream, max: usize) -> Result<Vec<u8>, FrameError> {
    let mut len = [0; 4];
    read_exact(recv, &mut len, true).await?;
    let len = u32::from_be_bytes(len) as usize;
    if len > max {
        return Err(FrameError::Bad("the peer sent a message over the limit"));
    }
    let mut bytes = vec![0; len];
    read_exact(recv, &mut bytes, false).await?;
    Ok(bytes)
}

pub(crate) async fn read_exact(
    recv: &mut RecvStream,
    into: &mut [u8],
    may_end: bool,
) -> Result<(), FrameError> {
    match recv.read_exact(into).await {
        Ok(()) => Ok(()),
        Err(ReadExactError::FinishedEarly(0)) if may_end => Err(FrameError::End),
        Err(ReadExactError::FinishedEarly(_)) => {
            Err(FrameError::Bad("the peer cut a message short"))
        }
        Err(ReadExactError::ReadError(quinn::ReadError::ConnectionLost(error))) => {
            Err(FrameError::Lost(error))
        }
        Err(ReadExactError::ReadError(_)) => Err(FrameError::Bad("the peer reset its stream")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout)]
    use super::*;

    fn steps() -> Vec<Step> {
        let ready = |secret| {
            Step::Ready(Ready {
                instance: 1,
                succeeds: Some(3),
                current: Some(2),
                nickname: "host".to_owned(),
                hello: b"{}".to_vec(),
                secret,
            })
        };
        vec![
            Step::Start { method: Method::Password, share: [1; 32] },
            Step::Start { method: Method::Token([9; 4]), share: [1; 32] },
            Step::Share([2; 32]),
            Step::Proof([3; 32]),
            Step::Accept([4; 32]),
            ready(None),
            ready(Some(Secret::random())),
            Step::Joined,
            Step::Use(Decision { order: 77, renews: Some(78) }),
            Step::Use(Decision { order: 79, renews: None }),
        ]
    }

    #[test]
    fn every_step_survives_the_wire_and_no_other_length_is_taken() {
        for step in steps() {
            let bytes = step.encode();
            assert!(bytes.len() <= ADMISSION_MAX_BYTES);
            let again = Step::decode(&bytes).unwrap();
            assert_eq!(again.encode(), bytes);
            for cut in 0..bytes.len() {
                assert!(Step::decode(&bytes[..cut]).is_none(), "{step:?} cut to {cut}");
            }
            let mut longer = bytes.to_vec();
            longer.push(0);
            assert!(Step::decode(&longer).is_none());
        }
    }

    #[test]
    fn random_bytes_never_panic() {
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut state = seed | 1;
        for _ in 0..20_000 {
            let mut bytes = Vec::new();
            for _ in 0..(state % 80) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.push(state as u8);
            }
            if let Some(first) = bytes.first_mut() {
                *first %= 9;
            }
            let _ = Step::decode(&bytes);
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15) | 1;
        }
    }

    #[test]
    fn versions_are_agreed_on_only_where_they_overlap() {
        assert_eq!(versions_of(&preamble(&(2..=5))), Some(2..=5));
        assert_eq!(versions_of(&[0; 16]), None);
        assert_eq!(versions_of(&preamble(&RangeInclusive::new(5, 2))), None);
        assert_eq!(common_version(&(1..=3), &(2..=9)), Some(3));
        assert_eq!(common_version(&(1..=1), &(2..=3)), None);
        assert_eq!(common_version(&(4..=4), &(2..=3)), None);
    }
}
