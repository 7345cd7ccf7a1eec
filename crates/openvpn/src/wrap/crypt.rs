//! tls-crypt: control packets encrypted and authenticated; the MAC is the initial counter of the encryption, so that
//! two packets with one counter are the same packet.
//!
//! opcode and key id 1 | own session id 8 | replay id 8 | tag 32 | the rest of the plain packet, encrypted.

use aws_lc_rs::cipher::{
    AES_256, AES_256_KEY_LEN, AES_CTR_IV_LEN, EncryptingKey, EncryptionContext, UnboundCipherKey,
};
use aws_lc_rs::hmac;
use aws_lc_rs::iv::FixedLength;

use super::replay::ReplayId;
use super::{HEAD_BYTES, WrapError};
use crate::device::{KeyBlock, Side};

/// Bytes of the tag, an HMAC-SHA256.
pub(super) const TAG_BYTES: usize = 32;
/// How much longer than a plain packet a wrapped one is.
pub(super) const OVERHEAD_BYTES: usize = ReplayId::BYTES + TAG_BYTES;
/// Where cipher key and MAC key begin in each half of a static key, and how long both are.
const CIPHER_START: usize = 0;
const MAC_START: usize = 64;
const KEY_BYTES: usize = AES_256_KEY_LEN;
const HALF_BYTES: usize = 128;

/// The keys of tls-crypt at one end.
///
/// A server keeps two of these for each client, and uses them for a few packets in an hour. So they are bytes alone:
/// expanded for both directions they would take 6 KB.
pub struct CryptKeys {
    original: KeyBlock,
    side: Side,
}

impl CryptKeys {
    /// Keeps a static key, of which each end uses a half to send.
    pub fn new(key: &KeyBlock, side: Side) -> Self {
        Self { original: key.clone(), side }
    }

    /// The half that this end seals with. Unlike in the data channel, the server has the first.
    fn seals(&self) -> Half {
        self.half(self.side == Side::Server)
    }

    fn opens(&self) -> Half {
        self.half(self.side == Side::Client)
    }

    fn half(&self, is_first: bool) -> Half {
        let (first, second) = self.original.expose().split_at(HALF_BYTES);
        Half::new(if is_first { first } else { second })
    }

    pub(super) const fn original(&self) -> &KeyBlock {
        &self.original
    }

    pub(super) fn wrap(&self, plain: &[u8], id: ReplayId, out: &mut Vec<u8>) {
        let (head, rest) = plain.split_at(HEAD_BYTES.min(plain.len()));
        let id = id.to_bytes();
        out.reserve(plain.len() + OVERHEAD_BYTES);
        out.extend_from_slice(head);
        out.extend_from_slice(&id);
        self.seals().seal(&[head, &id], rest, out);
    }

    pub(super) fn unwrap(&self, bytes: &[u8], out: &mut Vec<u8>) -> Result<ReplayId, WrapError> {
        let short = WrapError::Truncated { need: HEAD_BYTES + OVERHEAD_BYTES, have: bytes.len() };
        let (head, behind) = bytes.split_at_checked(HEAD_BYTES).ok_or(short)?;
        let (id, behind) = behind.split_first_chunk::<{ ReplayId::BYTES }>().ok_or(short)?;
        let start = out.len();
        out.extend_from_slice(head);
        let opened = self.opens().open(&[head, id], behind, out);
        opened.inspect_err(|_| out.truncate(start)).map(|()| ReplayId::from_bytes(*id))
    }
}

/// The cipher key and the MAC key of one direction; a tls-crypt-v2 server's key is one of these as well.
pub(super) struct Half {
    cipher: EncryptingKey,
    mac: hmac::Key,
}

impl Half {
    /// The keys out of half a static key, which has 128 bytes.
    pub(super) fn new(half: &[u8]) -> Self {
        let cipher = UnboundCipherKey::new(&AES_256, &half[CIPHER_START..CIPHER_START + KEY_BYTES]);
        let cipher = cipher.and_then(EncryptingKey::ctr);
        Self {
            cipher: cipher.expect("a key of 32 bytes is one of AES-256"),
            mac: hmac::Key::new(hmac::HMAC_SHA256, &half[MAC_START..MAC_START + KEY_BYTES]),
        }
    }

    /// Appends tag and ciphertext.
    pub(super) fn seal(&self, associated: &[&[u8]], plain: &[u8], out: &mut Vec<u8>) {
        let tag = self.tag(associated, plain);
        out.extend_from_slice(&tag);
        let start = out.len();
        out.extend_from_slice(plain);
        self.crypt(&tag, &mut out[start..]);
    }

    /// Appends the plaintext of tag and ciphertext, or nothing.
    pub(super) fn open(
        &self,
        associated: &[&[u8]],
        sealed: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), WrapError> {
        let short = WrapError::Truncated { need: TAG_BYTES, have: sealed.len() };
        let (tag, ciphertext) = sealed.split_first_chunk::<TAG_BYTES>().ok_or(short)?;
        let start = out.len();
        out.extend_from_slice(ciphertext);
        self.crypt(tag, &mut out[start..]);
        let expected = self.tag(associated, &out[start..]);
        aws_lc_rs::constant_time::verify_slices_are_equal(&expected, tag).map_err(|_| {
            out.truncate(start);
            WrapError::BadMac
        })
    }

    fn tag(&self, associated: &[&[u8]], plain: &[u8]) -> [u8; TAG_BYTES] {
        let mut mac = hmac::Context::with_key(&self.mac);
        associated.iter().copied().chain([plain]).for_each(|part| mac.update(part));
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(mac.sign().as_ref());
        tag
    }

    /// Encrypts or decrypts: in counter mode both are the same.
    fn crypt(&self, tag: &[u8; TAG_BYTES], bytes: &mut [u8]) {
        let mut counter = [0; AES_CTR_IV_LEN];
        counter.copy_from_slice(&tag[..AES_CTR_IV_LEN]);
        let context = EncryptionContext::Iv128(FixedLength::from(counter));
        let done = self.cipher.less_safe_encrypt(bytes, context);
        done.expect("counter mode takes any length");
    }
}
