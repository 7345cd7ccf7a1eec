//! From a TLS session to the keys of the data channel (`docs/design/ovpn.md`, key block).
//!
//! Both ends that know the TLS exporter take the 256 bytes from there. Else they come from random bytes that
//! both sent in their key method 2 messages, by the PRF of TLS 1.0 (RFC 2246 section 5).

use std::fmt;

use aws_lc_rs::hmac as sha_hmac;
use hmac::{Hmac, KeyInit, Mac};
use md5::Md5;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::SessionId;
use crate::device::{KEY_BLOCK_BYTES, KeyBlock};

/// The exporter's label (RFC 5705) of the data channel's keys. The exporter gets no context, not an empty one.
pub const DATA_KEYS_LABEL: &[u8] = b"EXPORTER-OpenVPN-datakeys";
/// The exporter's label of the key that wraps later handshakes; no context.
pub const DYNAMIC_TLS_CRYPT_LABEL: &[u8] = b"EXPORTER-OpenVPN-dynamic-tls-crypt";
/// Bytes of a client's pre-master secret.
pub const PRE_MASTER_BYTES: usize = 48;
/// Bytes of each of the two random values of an end.
pub const RANDOM_BYTES: usize = 32;

const MASTER_BYTES: usize = 48;
const MASTER_LABEL: &[u8] = b"OpenVPN master secret";
const EXPANSION_LABEL: &[u8] = b"OpenVPN key expansion";
const MD5_BYTES: usize = 16;
const SHA1_BYTES: usize = 20;

/// The random bytes of a client's key method 2 message. They are erased when dropped, and never shown.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct ClientKeySource {
    /// The secret that all else follows from.
    pub pre_master: [u8; PRE_MASTER_BYTES],
    /// Goes into the master secret.
    pub random1: [u8; RANDOM_BYTES],
    /// Goes into the key block.
    pub random2: [u8; RANDOM_BYTES],
}

/// The random bytes of a server's key method 2 message. They are erased when dropped, and never shown.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct ServerKeySource {
    /// Goes into the master secret.
    pub random1: [u8; RANDOM_BYTES],
    /// Goes into the key block.
    pub random2: [u8; RANDOM_BYTES],
}

impl fmt::Debug for ClientKeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientKeySource").finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerKeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerKeySource").finish_non_exhaustive()
    }
}

/// The key block of two ends of which one does not know the exporter.
pub fn key_block_by_prf(
    client: &ClientKeySource,
    server: &ServerKeySource,
    client_session: SessionId,
    server_session: SessionId,
) -> KeyBlock {
    let mut master = Zeroizing::new([0; MASTER_BYTES]);
    let seed = [MASTER_LABEL, &client.random1, &server.random1];
    prf(&client.pre_master, &seed, &mut *master);
    let mut block = Zeroizing::new([0; KEY_BLOCK_BYTES]);
    let seed = [
        EXPANSION_LABEL,
        &client.random2,
        &server.random2,
        client_session.as_bytes(),
        server_session.as_bytes(),
    ];
    prf(&*master, &seed, &mut *block);
    KeyBlock::new(*block)
}

/// The key block of two ends that know the exporter. `export` fills its first argument by the label that is its
/// second, without a context.
///
/// # Errors
/// Those of `export`.
pub fn key_block_by_exporter<E>(
    export: impl FnOnce(&mut [u8], &[u8]) -> Result<(), E>,
) -> Result<KeyBlock, E> {
    let mut block = Zeroizing::new([0; KEY_BLOCK_BYTES]);
    export(&mut *block, DATA_KEYS_LABEL)?;
    Ok(KeyBlock::new(*block))
}

/// The PRF of TLS 1.0: P_MD5 of the secret's first half XOR P_SHA1 of its second. The halves of a secret of odd
/// length share its middle byte.
fn prf(secret: &[u8], seed: &[&[u8]], out: &mut [u8]) {
    let half = secret.len().div_ceil(2);
    out.fill(0);
    let (first, second) = (&secret[..half], &secret[secret.len() - half..]);
    let md5_hmac = |parts: &[&[u8]]| -> Zeroizing<[u8; MD5_BYTES]> {
        let mut hmac = Hmac::<Md5>::new_from_slice(first).expect("HMAC takes keys of any length");
        parts.iter().for_each(|part| hmac.update(part));
        Zeroizing::new(hmac.finalize().into_bytes().into())
    };
    xor_expansion(md5_hmac, seed, out);
    let key = sha_hmac::Key::new(sha_hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, second);
    let sha1_hmac = |parts: &[&[u8]]| -> Zeroizing<[u8; SHA1_BYTES]> {
        let mut context = sha_hmac::Context::with_key(&key);
        parts.iter().for_each(|part| context.update(part));
        let mut tag = Zeroizing::new([0; SHA1_BYTES]);
        tag.copy_from_slice(context.sign().as_ref());
        tag
    };
    xor_expansion(sha1_hmac, seed, out);
}

/// P_hash of RFC 2246, XORed onto `out`.
fn xor_expansion<const N: usize>(
    hmac: impl Fn(&[&[u8]]) -> Zeroizing<[u8; N]>,
    seed: &[&[u8]],
    out: &mut [u8],
) {
    let mut a = hmac(seed);
    for piece in out.chunks_mut(N) {
        let mut parts = vec![&a[..]];
        parts.extend_from_slice(seed);
        let block = hmac(&parts);
        piece.iter_mut().zip(block.iter()).for_each(|(byte, other)| *byte ^= other);
        a = hmac(&[&a[..]]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::device::Side;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let pair =
            |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    /// The output of `openssl kdf -kdfopt digest:MD5-SHA1 … TLS1-PRF`, OpenSSL 3.0.
    #[test]
    fn the_prf_is_that_of_openssl() {
        let mut out = [0; 48];
        prf(b"Lorem ipsum secret odd!", &[b"seed of ", b"the test"], &mut out);
        assert_eq!(
            out[..],
            hex("77E216329E910F97A65BC7C2637DF19A378E2A7D2E89CF0FF98752FAAD2A8A3F
                 BBAA5FEB7B5106F0A0468630392DBEDB")
        );
    }

    fn sources() -> (ClientKeySource, ServerKeySource, SessionId, SessionId) {
        let client =
            ClientKeySource { pre_master: [0xaa; 48], random1: [0xb1; 32], random2: [0xb2; 32] };
        let server = ServerKeySource { random1: [0xc1; 32], random2: [0xc2; 32] };
        let session = |byte| SessionId::new([byte; 8]).unwrap();
        (client, server, session(0xd1), session(0xd2))
    }

    /// Computed in the two steps of the documented layout by OpenSSL's TLS1-PRF.
    #[test]
    fn the_key_block_is_made_in_two_steps() {
        let (client, server, ours, theirs) = sources();
        let block = key_block_by_prf(&client, &server, ours, theirs);
        let expected = hex("c32a513402b2d307f04b7c5d9cb57f5a27b646a5f2221a3c57d46ae6bbccae90
             93de88a697b9d3228a5fac5d9440926bc3e4753d1f673c922de70a12326052d9
             2f8f7e66c9c2b8e302e0a6a8282874af7390ae4430d589b8e058d8a5a5968270
             245678ca0916e70be4e778c65067622656fdf0569951e39f6d01303b85317340
             4c04b4d6419b0f764d7c469fe2d96b705c3671a2c199e3e80f54432e7936a235
             9159752191d665b583e18dcc529342e389c49e4c837189f33cc587ad18584e5e
             0bd0506342aaa11fd0457de99be3b751ce60d167a890c636a2d0a58a07982515
             e6b21e372f21197971c6413037c44893fa6785b6bd77daf7e77132e4d7f82de5");
        assert_eq!(block.expose()[..], expected);
        let swapped = key_block_by_prf(&client, &server, theirs, ours);
        assert_ne!(swapped.expose()[..], block.expose()[..]);
    }

    #[test]
    fn the_exporter_fills_the_block_by_its_label() {
        let block = key_block_by_exporter(|out: &mut [u8], label: &[u8]| {
            assert_eq!(label, b"EXPORTER-OpenVPN-datakeys");
            out.iter_mut().zip(0..=255).for_each(|(byte, at)| *byte = at);
            Ok::<(), ()>(())
        })
        .unwrap();
        let (seals, opens) = block.directions(Side::Server, 32);
        assert_eq!((seals.cipher_key[0], seals.nonce_tail[0]), (128, 192));
        assert_eq!((opens.cipher_key[0], opens.nonce_tail[0]), (0, 64));
        assert_eq!(key_block_by_exporter(|_, _| Err("no exporter")).err(), Some("no exporter"));
    }

    #[test]
    fn no_secret_shows_in_debug_output() {
        let (client, server, ..) = sources();
        let text = format!("{client:?} {server:?}");
        assert_eq!(text, "ClientKeySource { .. } ServerKeySource { .. }");
    }
}
