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
//! A listener learns nothing that helps to guess. An active attacker tests exactly one password per run, whichever
//! side it plays: the shares and tags fix its guess. The responder shows its tag only after the initiator has
//! proven the password. So it sees and counts each guess against it as a failure. A run that ends before the
//! initiator's tag is also a failure.
//!
//! Binding to the link (`docs/design/keys.md`): `sid` is the TLS exporter of the very connection. `ada` and `adb`
//! are the identity public keys of the initiator, who dialled, and the responder. Each side takes them from the
//! certificates of that connection, never from the message. Relaying a run between two TLS connections, or to
//! another host that has the same password, then fails like a wrong password. Each side must refuse its own
//! identity as the peer's.

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
/// The input block of SHA-512, which the generator string's first part fills (draft section 8.1).
const HASH_BLOCK_LEN: usize = 128;
const INFO_KEY: &[u8] = b"weft cpace key";

/// Why a run failed. After any of these, close the connection; the responder counts a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpaceError {
    /// The peer's: its share encodes no group element, or the neutral one.
    #[error("the peer sent an invalid password-exchange share")]
    InvalidShare,
    /// The peer's, or the administrator's: the passwords differ, or someone stands in between.
    #[error("the passwords of the two hosts differ")]
    WrongPassword,
}

/// The values that both sides must agree on besides the password; any part may be empty.
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

    /// Each role has a separate key, so that a tag sent back proves nothing.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::testing::{hex, hex_array};

    /// Of draft-irtf-cfrg-cpace-21 appendix B.3.
    fn draft_context() -> CpaceContext {
        CpaceContext {
            ci: hex("0b415f696e69746961746f720b425f726573706f6e646572"),
            sid: hex("7e4b4791d6a8ef019b936c79fb7f2c57"),
            ada: b"ADa".to_vec(),
            adb: b"ADb".to_vec(),
        }
    }

    fn scalar(text: &str) -> Zeroizing<Scalar> {
        Zeroizing::new(Scalar::from_canonical_bytes(hex_array(text)).unwrap())
    }

    fn draft_run() -> (CpaceSecret<Initiator>, CpaceSecret<Responder>) {
        let context = draft_context();
        let ya = scalar("da3d23700a9e5699258aef94dc060dfda5ebb61f02a5ea77fad53f4ff0976d08");
        let yb = scalar("d2316b454718c35362d83d69df6320f38578ed5984651435e2949762d900b80d");
        let (initiator, share_a) = CpaceInitiator::with_scalar(b"Password", &context, ya);
        assert_eq!(
            share_a,
            hex_array("d6bac480f2c386c394efc7c47adb9925dcd2630b64f240c50f8d0eec482b9157")
        );
        let (responder, share_b) =
            CpaceResponder::with_scalar(b"Password", &context, &share_a, &yb).unwrap();
        assert_eq!(
            share_b,
            hex_array("3ea7e0b19560d7c0b0f5734f63b955286dfa8232b5ebe63324e2d9e7433f7258")
        );
        let k = hex_array("80b69a8a76457ab6a4d7f887a4bf6b55a2f80ac19c333f917a05fc9887c8b40f");
        assert_eq!(shared_point(&initiator.scalar, &share_b), Ok(Zeroizing::new(k)));
        assert_eq!(shared_point(&yb, &share_a), Ok(Zeroizing::new(k)));
        (initiator.finish(&share_b).unwrap(), responder)
    }

    /// Appendix B.3.1.
    #[test]
    fn the_generator_agrees_with_the_draft() {
        let context = draft_context();
        assert_eq!(
            *generator_string(b"Password", &context),
            hex("11435061636552697374726574746f3235350850617373776f726464
                 00000000000000000000000000000000000000000000000000000000
                 00000000000000000000000000000000000000000000000000000000
                 00000000000000000000000000000000000000000000000000000000
                 00000000000000000000000000000000180b415f696e69746961746f
                 720b425f726573706f6e646572107e4b4791d6a8ef019b936c79fb7f
                 2c57")
        );
        assert_eq!(
            generator(b"Password", &context).compress().to_bytes(),
            hex_array("222b6b195fe84b1652badb6f6a3ae3d24341e7306967f0b8115b40d5698c7e56")
        );
    }

    /// Appendix B.3.2 to B.3.5.
    #[test]
    fn shares_and_session_key_agree_with_the_draft() {
        let (initiator, responder) = draft_run();
        let isk: [u8; 64] = hex_array(
            "b69effbf61b51d56401c0f65601abe428de8206feaaf0e32198896dcae7b35cd
             2b38950a39dfd5d4a79164614c2984f7daa460b588c1e80c3fa2068af7900447",
        );
        assert_eq!((*initiator.isk, *responder.isk), (isk, isk));
    }

    /// The tags and the key are Weft's own; the expected values were computed with another HKDF and
    /// HMAC from the draft's session key and transcript.
    #[test]
    fn tags_and_key_have_a_fixed_form() {
        let (initiator, responder) = draft_run();
        let tag = initiator.tag();
        assert_eq!(
            tag,
            hex_array("31369ad8565676c5a03cd9d71819b46275450bc07a0bf5e295c2c9d694c45a8f")
        );
        let (key, answer) = responder.verify(&tag).unwrap();
        assert_eq!(
            answer,
            hex_array("62e95abeb14cf7780e2e7ee6fb2617027b1fd3f7e89ec6e8b7fa25f4290506af")
        );
        assert_eq!(
            key.expose(),
            &hex_array("e65d0adf045ecdd727dd19262b950626360cf25d5c53067701d60efa9c17315c")
        );
        assert_eq!(initiator.verify(&answer).unwrap(), key);
    }

    /// Appendix B.3.10 and B.3.11.
    #[test]
    fn scalar_multiplication_agrees_with_the_draft_and_refuses_invalid_points() {
        let s = scalar("7cd0e075fa7955ba52c02759a6c90dbbfc10e6d40aea8d283e407d88cf538a05");
        let valid = hex_array("2c3c6b8c4f3800e7aef6864025b4ed79bd599117e427c41bd47d93d654b4a51c");
        assert_eq!(
            *shared_point(&s, &valid).unwrap(),
            hex_array("7c13645fe790a468f62c39beb7388e541d8405d1ade69d1778c5fe3e7f6b600e")
        );
        for invalid in
            [hex_array("2b3c6b8c4f3800e7aef6864025b4ed79bd599117e427c41bd47d93d654b4a51c"), [0; 32]]
        {
            assert_eq!(shared_point(&s, &invalid), Err(CpaceError::InvalidShare));
            let (initiator, _) = CpaceInitiator::start(b"p", &draft_context(), [1; 64]);
            assert_eq!(initiator.finish(&invalid).unwrap_err(), CpaceError::InvalidShare);
            let answer = CpaceResponder::respond(b"p", &draft_context(), &invalid, [2; 64]);
            assert_eq!(answer.unwrap_err(), CpaceError::InvalidShare);
        }
    }

    /// Appendix A.1.2.
    #[test]
    fn lengths_are_leb128() {
        let with_len = |part: &[u8]| {
            let mut out = Vec::new();
            append_with_len(&mut out, part);
            out
        };
        assert_eq!(with_len(b""), hex("00"));
        assert_eq!(with_len(b"1234"), hex("0431323334"));
        assert_eq!(with_len(&[5; 127])[..2], hex("7f05"));
        assert_eq!(with_len(&[5; 128])[..3], hex("800105"));
        assert_eq!(with_len(&[5; 300])[..3], hex("ac0205"));
    }

    fn run(
        password_a: &[u8],
        context_a: &CpaceContext,
        password_b: &[u8],
        context_b: &CpaceContext,
    ) -> (CpaceSecret<Initiator>, CpaceSecret<Responder>) {
        let (initiator, share_a) = CpaceInitiator::start(password_a, context_a, [1; 64]);
        let (responder, share_b) =
            CpaceResponder::respond(password_b, context_b, &share_a, [2; 64]).unwrap();
        (initiator.finish(&share_b).unwrap(), responder)
    }

    #[test]
    fn passwords_of_any_length_work() {
        for len in [0, 1, 100, 101, 108, 109, 110, 111, 112, 127, 128, 129, 1000] {
            let password = vec![b'x'; len];
            let (a, b) = run(&password, &draft_context(), &password, &draft_context());
            let (key_b, answer) = b.verify(&a.tag()).unwrap();
            assert_eq!(a.verify(&answer).unwrap(), key_b, "length {len}");
        }
    }

    #[test]
    fn a_wrong_password_or_any_other_view_of_the_run_proves_nothing_to_either_side() {
        let good = draft_context();
        let mut cases = vec![(&b"passwore"[..], good.clone()), (b"password\0", good.clone())];
        let fields: [fn(&mut CpaceContext) -> &mut Vec<u8>; 4] =
            [|c| &mut c.ci, |c| &mut c.sid, |c| &mut c.ada, |c| &mut c.adb];
        for field in fields {
            let mut other = good.clone();
            field(&mut other).push(0);
            cases.push((b"password", other));
        }
        let mut swapped = good.clone();
        std::mem::swap(&mut swapped.ada, &mut swapped.adb);
        cases.push((b"password", swapped));
        for (password, context) in cases {
            let (a, b) = run(b"password", &good, password, &context);
            let would_answer = b.tag_of(Side::Responder);
            assert_eq!(b.verify(&a.tag()).unwrap_err(), CpaceError::WrongPassword, "{context:?}");
            assert_eq!(a.verify(&would_answer).unwrap_err(), CpaceError::WrongPassword);
        }
    }

    #[test]
    fn a_tag_sent_back_or_changed_is_no_proof() {
        let context = draft_context();
        let (a, _) = run(b"password", &context, b"password", &context);
        let own = a.tag();
        assert_eq!(a.verify(&own).unwrap_err(), CpaceError::WrongPassword);
        for byte in 0..CPACE_TAG_LEN {
            let (a, b) = run(b"password", &context, b"password", &context);
            let mut tag = a.tag();
            tag[byte] ^= 0x80;
            assert_eq!(b.verify(&tag).unwrap_err(), CpaceError::WrongPassword, "byte {byte}");
        }
    }

    #[test]
    fn a_changed_share_is_noticed() {
        let context = draft_context();
        let (_, other_share) = CpaceInitiator::start(b"password", &context, [9; 64]);
        let (initiator, _) = CpaceInitiator::start(b"password", &context, [1; 64]);
        let (responder, share_b) =
            CpaceResponder::respond(b"password", &context, &other_share, [2; 64]).unwrap();
        let secret = initiator.finish(&share_b).unwrap();
        assert_eq!(responder.verify(&secret.tag()).unwrap_err(), CpaceError::WrongPassword);
    }

    #[test]
    fn other_random_bytes_make_other_shares() {
        let context = draft_context();
        let (_, share) = CpaceInitiator::start(b"password", &context, [1; 64]);
        assert_ne!(share, CpaceInitiator::start(b"password", &context, [2; 64]).1);
        let mut other = context;
        other.sid.push(1);
        assert_ne!(share, CpaceInitiator::start(b"password", &other, [1; 64]).1);
    }
}
