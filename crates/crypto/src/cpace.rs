//! CPace-ristretto255-SHA512, initiator and responder setting (draft-irtf-cfrg-cpace-21), with key
//! confirmation: both sides prove that they know the password, or neither learns anything.
//!
//! Three messages after the transport is up, initiator first:
//!
//! ```text
//! initiator                             responder
//!   start()   --- share Ya ------------>  respond()
//!   finish()  <-- share Yb -------------
//!   tag()     --- initiator's tag ----->  verify() -> responder's tag
//!   verify()  <-- responder's tag ------
//! ```
//!
//! A listener learns nothing that helps to guess. An active attacker tests exactly one password per
//! run, whichever side it plays: the shares and tags fix its guess. The responder shows its tag only
//! to whoever has proven the password, so each guess against it is a failure that it sees and
//! counts; a run that ends before the initiator's tag is one as well.
//!
//! Binding to the link (DESIGN section 6.1): `sid` is the TLS exporter of the very connection, `ada`
//! and `adb` are the identity public keys of the initiator (who dialled) and the responder, as each
//! side took them from the certificates of that connection, never from the message. Relaying a run
//! between two TLS connections, or to another host that has the same password, then fails like a
//! wrong password. Each side must refuse its own identity as the peer's.

use std::fmt;
use std::marker::PhantomData;

use aws_lc_rs::digest::{self, SHA512};
use aws_lc_rs::{hkdf, hmac};
use curve25519_dalek::ristretto::{CompressedRistretto, RistrettoPoint};
use curve25519_dalek::scalar::Scalar;
use curve25519_dalek::traits::IsIdentity;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::schedule::hkdf_into;

/// Bytes of a share on the wire.
pub const CPACE_SHARE_LEN: usize = 32;

/// Bytes of a confirmation tag on the wire.
pub const CPACE_TAG_LEN: usize = 32;

const DSI: &[u8] = b"CPaceRistretto255";
const DSI_ISK: &[u8] = b"CPaceRistretto255_ISK";
/// The input block of SHA-512: what the generator string's first part fills (draft section 8.1).
const HASH_BLOCK_LEN: usize = 128;
const INFO_KEY: &[u8] = b"weft cpace key";

/// Why a run failed. After any of these, close the connection; the responder counts a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpaceError {
    /// The peer's: its share encodes no group element, or the neutral one.
    #[error("the peer sent an invalid password-exchange share")]
    InvalidShare,
    /// The peer's, or the administrator's: the passwords differ, or someone stands in between.
    #[error("the password of the two hosts differs")]
    WrongPassword,
}

/// What both sides must agree on besides the password; any part may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpaceContext {
    /// The channel identifier CI, such as the protocol's name and version.
    pub ci: Vec<u8>,
    /// The session identifier: unique to this connection.
    pub sid: Vec<u8>,
    /// The initiator's associated data ADa: its identity.
    pub ada: Vec<u8>,
    /// The responder's associated data ADb: its identity.
    pub adb: Vec<u8>,
}

/// An initiator that waits for the responder's share.
pub struct CpaceInitiator {
    scalar: Zeroizing<Scalar>,
    share: [u8; CPACE_SHARE_LEN],
    context: CpaceContext,
}

impl CpaceInitiator {
    /// Begins a run; returns the share Ya for the responder.
    ///
    /// `random` is 64 bytes of a cryptographic random source, used for nothing else.
    pub fn start(
        password: &[u8],
        context: &CpaceContext,
        random: [u8; 64],
    ) -> (Self, [u8; CPACE_SHARE_LEN]) {
        Self::with_scalar(password, context, scalar_of(random))
    }

    /// Takes the responder's share Yb.
    ///
    /// # Errors
    /// [`CpaceError::InvalidShare`].
    pub fn finish(self, yb: &[u8; CPACE_SHARE_LEN]) -> Result<CpaceSecret<Initiator>, CpaceError> {
        let k = shared_point(&self.scalar, yb)?;
        Ok(CpaceSecret::new(&self.context, &k, &self.share, yb))
    }

    fn with_scalar(
        password: &[u8],
        context: &CpaceContext,
        scalar: Zeroizing<Scalar>,
    ) -> (Self, [u8; CPACE_SHARE_LEN]) {
        let share = share_of(password, context, &scalar);
        (Self { scalar, share, context: context.clone() }, share)
    }
}

impl fmt::Debug for CpaceInitiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CpaceInitiator(secret)")
    }
}

/// The responder's side, which answers in one step.
#[derive(Debug)]
pub struct CpaceResponder;

impl CpaceResponder {
    /// Answers the initiator's share Ya; returns the share Yb for the initiator.
    ///
    /// `random` is 64 bytes of a cryptographic random source, used for nothing else.
    ///
    /// # Errors
    /// [`CpaceError::InvalidShare`].
    pub fn respond(
        password: &[u8],
        context: &CpaceContext,
        ya: &[u8; CPACE_SHARE_LEN],
        random: [u8; 64],
    ) -> Result<(CpaceSecret<Responder>, [u8; CPACE_SHARE_LEN]), CpaceError> {
        Self::with_scalar(password, context, ya, &scalar_of(random))
    }

    fn with_scalar(
        password: &[u8],
        context: &CpaceContext,
        ya: &[u8; CPACE_SHARE_LEN],
        scalar: &Scalar,
    ) -> Result<(CpaceSecret<Responder>, [u8; CPACE_SHARE_LEN]), CpaceError> {
        let share = share_of(password, context, scalar);
        let k = shared_point(scalar, ya)?;
        Ok((CpaceSecret::new(context, &k, ya, &share), share))
    }
}

/// Marks the initiator's [`CpaceSecret`].
#[derive(Debug)]
pub struct Initiator;

/// Marks the responder's [`CpaceSecret`].
#[derive(Debug)]
pub struct Responder;

/// A secret that the peer has too if, and only if, it used the same password and context. Worth
/// nothing until the peer's tag has been verified.
pub struct CpaceSecret<Role> {
    /// The draft's intermediate session key.
    isk: Zeroizing<[u8; 64]>,
    sid: Vec<u8>,
    transcript: Vec<u8>,
    role: PhantomData<Role>,
}

impl CpaceSecret<Initiator> {
    /// The initiator's proof, to be sent as soon as the responder's share is here.
    pub fn tag(&self) -> [u8; CPACE_TAG_LEN] {
        self.tag_of(Side::Initiator)
    }

    /// Takes the responder's proof. The time taken does not depend on where it is wrong.
    ///
    /// # Errors
    /// [`CpaceError::WrongPassword`].
    pub fn verify(self, tag: &[u8; CPACE_TAG_LEN]) -> Result<CpaceKey, CpaceError> {
        self.check(Side::Responder, tag)?;
        Ok(self.key())
    }
}

impl CpaceSecret<Responder> {
    /// Takes the initiator's proof; only then is there the responder's proof to send. The time
    /// taken does not depend on where it is wrong.
    ///
    /// # Errors
    /// [`CpaceError::WrongPassword`]; nothing may be sent but a refusal.
    pub fn verify(
        self,
        tag: &[u8; CPACE_TAG_LEN],
    ) -> Result<(CpaceKey, [u8; CPACE_TAG_LEN]), CpaceError> {
        self.check(Side::Initiator, tag)?;
        Ok((self.key(), self.tag_of(Side::Responder)))
    }
}

/// Whose tag it is.
#[derive(Clone, Copy)]
enum Side {
    Initiator,
    Responder,
}

impl<Role> CpaceSecret<Role> {
    /// ISK = H(lv_cat(DSI_ISK, sid, K) || transcript_ir) (draft section 7.2).
    fn new(
        context: &CpaceContext,
        k: &[u8; 32],
        ya: &[u8; CPACE_SHARE_LEN],
        yb: &[u8; CPACE_SHARE_LEN],
    ) -> Self {
        let mut transcript = Vec::new();
        for part in [ya.as_slice(), &context.ada, yb, &context.adb] {
            append_with_len(&mut transcript, part);
        }
        let mut input = Zeroizing::new(Vec::with_capacity(
            DSI_ISK.len() + context.sid.len() + k.len() + transcript.len() + 3 * LEB128_LEN_MAX,
        ));
        for part in [DSI_ISK, &context.sid, k] {
            append_with_len(&mut input, part);
        }
        input.extend_from_slice(&transcript);
        Self { isk: sha512(&input), sid: context.sid.clone(), transcript, role: PhantomData }
    }

    fn check(&self, side: Side, tag: &[u8; CPACE_TAG_LEN]) -> Result<(), CpaceError> {
        hmac::verify(&self.tag_key(side), &self.transcript, tag)
            .map_err(|_| CpaceError::WrongPassword)
    }

    fn tag_of(&self, side: Side) -> [u8; CPACE_TAG_LEN] {
        let mut tag = [0; CPACE_TAG_LEN];
        tag.copy_from_slice(hmac::sign(&self.tag_key(side), &self.transcript).as_ref());
        tag
    }

    /// Each role has a key of its own, so that a tag sent back is no proof.
    fn tag_key(&self, side: Side) -> hmac::Key {
        let info: &[u8] = match side {
            Side::Initiator => b"weft cpace confirm initiator",
            Side::Responder => b"weft cpace confirm responder",
        };
        let mut key = Zeroizing::new([0; 32]);
        hkdf_into(hkdf::HKDF_SHA512, &self.sid, self.isk.as_slice(), &[info], key.as_mut_slice());
        hmac::Key::new(hmac::HMAC_SHA256, key.as_slice())
    }

    fn key(&self) -> CpaceKey {
        let mut key = CpaceKey([0; 32]);
        hkdf_into(hkdf::HKDF_SHA512, &self.sid, self.isk.as_slice(), &[INFO_KEY], &mut key.0);
        key
    }
}

impl<Role> fmt::Debug for CpaceSecret<Role> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CpaceSecret(secret)")
    }
}

/// 32 bytes that only the two sides of a confirmed run know.
#[derive(PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct CpaceKey([u8; 32]);

impl CpaceKey {
    /// The secret itself. Never log it.
    pub const fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for CpaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CpaceKey(secret)")
    }
}

/// More bytes than the LEB128 form of any length has.
const LEB128_LEN_MAX: usize = 10;

/// A scalar uniform below the group's order (draft section 8.3; zero has a chance of 2^-252).
fn scalar_of(random: [u8; 64]) -> Zeroizing<Scalar> {
    let random = Zeroizing::new(random);
    Zeroizing::new(Scalar::from_bytes_mod_order_wide(&random))
}

/// Y = encode(y * g).
fn share_of(password: &[u8], context: &CpaceContext, scalar: &Scalar) -> [u8; CPACE_SHARE_LEN] {
    let generator = generator(password, context);
    let share = Zeroizing::new(*generator * scalar);
    share.compress().to_bytes()
}

/// K = encode(y * decode(Y)), refused if there is no such point or it is neutral.
fn shared_point(
    scalar: &Scalar,
    share: &[u8; CPACE_SHARE_LEN],
) -> Result<Zeroizing<[u8; 32]>, CpaceError> {
    let point = CompressedRistretto(*share).decompress().ok_or(CpaceError::InvalidShare)?;
    let k = Zeroizing::new(point * scalar);
    if k.is_identity() {
        return Err(CpaceError::InvalidShare);
    }
    Ok(Zeroizing::new(k.compress().to_bytes()))
}

/// The password's generator of the group (draft sections 8.1 and 8.3).
fn generator(password: &[u8], context: &CpaceContext) -> Zeroizing<RistrettoPoint> {
    let hash = sha512(&generator_string(password, context));
    Zeroizing::new(RistrettoPoint::from_uniform_bytes(&hash))
}

/// lv_cat(DSI, PRS, zero padding, CI, sid): DSI and PRS with the padding fill the first hash block.
fn generator_string(password: &[u8], context: &CpaceContext) -> Zeroizing<Vec<u8>> {
    let capacity = HASH_BLOCK_LEN
        + DSI.len()
        + password.len()
        + context.ci.len()
        + context.sid.len()
        + 5 * LEB128_LEN_MAX;
    let mut string = Zeroizing::new(Vec::with_capacity(capacity));
    append_with_len(&mut string, DSI);
    append_with_len(&mut string, password);
    let padding = (HASH_BLOCK_LEN - 1).saturating_sub(string.len());
    append_with_len(&mut string, &[0; HASH_BLOCK_LEN][..padding]);
    append_with_len(&mut string, &context.ci);
    append_with_len(&mut string, &context.sid);
    string
}

/// prepend_len (draft section 6.3): the length in LEB128, then the bytes.
fn append_with_len(out: &mut Vec<u8>, part: &[u8]) {
    let mut len = part.len();
    while len >= 0x80 {
        out.push((len & 0x7f) as u8 | 0x80);
        len >>= 7;
    }
    out.push(len as u8);
    out.extend_from_slice(part);
}

fn sha512(input: &[u8]) -> Zeroizing<[u8; 64]> {
    let mut hash = Zeroizing::new([0; 64]);
    hash.copy_from_slice(digest::digest(&SHA512, input).as_ref());
    hash
}
