//! Join tokens: one-time secrets that admit one host, which then learns the network's secret.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::error::LinkError;
use crate::limits::{TOKEN_LIFETIME_S, TOKENS_MAX};

const ID_LEN: usize = 4;
const SECRET_LEN: usize = 18;
const CHECK_LEN: usize = 3;
const TOKEN_LEN: usize = ID_LEN + SECRET_LEN + CHECK_LEN;
const TEXT_LEN: usize = TOKEN_LEN * 8 / 5;
const PREFIX: &str = "weft";
/// Crockford's alphabet: no letter looks like a digit.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// Identifies a token on the wire; not secret.
pub(crate) type TokenId = [u8; ID_LEN];

/// A join token: 144 random bits, and an id by which the admitting host finds it.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct Token {
    id: TokenId,
    secret: [u8; SECRET_LEN],
}

impl Token {
    pub(crate) fn random() -> Self {
        let mut token = Self { id: [0; ID_LEN], secret: [0; SECRET_LEN] };
        rand::fill(&mut token.id);
        rand::fill(&mut token.secret);
        token
    }

    pub(crate) fn id(&self) -> TokenId {
        self.id
    }

    pub(crate) fn secret(&self) -> &[u8] {
        &self.secret
    }

    /// The token as text: one word of 44 letters and digits, selected by a double click. Give it
    /// only to the joining host's administrator.
    pub fn expose_text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + TEXT_LEN));
        text.push_str(PREFIX);
        let bytes = self.with_check();
        for group in bytes.chunks(5) {
            let value = group.iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
            for shift in (0..8).rev() {
                text.push(ALPHABET[(value >> (shift * 5)) as usize & 31] as char);
            }
        }
        text
    }

    /// Id, secret, and three bytes of their hash, so that a typing error is detected at once.
    fn with_check(&self) -> Zeroizing<[u8; TOKEN_LEN]> {
        let mut padded = Zeroizing::new([0; 32]);
        padded[..ID_LEN].copy_from_slice(&self.id);
        padded[ID_LEN..ID_LEN + SECRET_LEN].copy_from_slice(&self.secret);
        let check = PeerId::of_public_key(&padded);
        let mut bytes = Zeroizing::new([0; TOKEN_LEN]);
        bytes[..ID_LEN + SECRET_LEN].copy_from_slice(&padded[..ID_LEN + SECRET_LEN]);
        bytes[ID_LEN + SECRET_LEN..].copy_from_slice(&check.as_bytes()[..CHECK_LEN]);
        bytes
    }
}

impl FromStr for Token {
    type Err = LinkError;

    fn from_str(text: &str) -> Result<Self, LinkError> {
        let lower = Zeroizing::new(text.trim().to_ascii_lowercase());
        let digits = lower.strip_prefix(PREFIX).ok_or(LinkError::TokenFormat)?.as_bytes();
        if digits.len() != TEXT_LEN {
            return Err(LinkError::TokenFormat);
        }
        let mut bytes = Zeroizing::new([0; TOKEN_LEN]);
        for (group, out) in digits.chunks(8).zip(bytes.chunks_mut(5)) {
            let mut value = 0_u64;
            for digit in group {
                let digit = match digit {
                    b'o' => b'0',
                    b'i' | b'l' => b'1',
                    other => *other,
                };
                let position = ALPHABET.iter().position(|known| *known == digit);
                value = value << 5 | position.ok_or(LinkError::TokenFormat)? as u64;
            }
            out.copy_from_slice(&value.to_be_bytes()[3..]);
        }
        let mut token = Self { id: [0; ID_LEN], secret: [0; SECRET_LEN] };
        token.id.copy_from_slice(&bytes[..ID_LEN]);
        token.secret.copy_from_slice(&bytes[ID_LEN..ID_LEN + SECRET_LEN]);
        if *token.with_check() != *bytes {
            return Err(LinkError::TokenFormat);
        }
        Ok(token)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

/// The tokens that this host has issued.
#[derive(Default)]
pub(crate) struct TokenBook {
    live: VecDeque<Live>,
}

struct Live {
    token: Token,
    expires: Instant,
    /// The peer that has proven the token but has not confirmed the secret yet.
    claimed_by: Option<PeerId>,
}

impl TokenBook {
    pub(crate) fn create(&mut self, now: Instant) -> Token {
        self.expire(now);
        if self.live.len() >= TOKENS_MAX {
            self.live.pop_front();
        }
        let mut token = Token::random();
        while self.live.iter().any(|live| live.token.id == token.id) {
            token = Token::random();
        }
        let expires = now + Duration::from_secs(TOKEN_LIFETIME_S);
        self.live.push_back(Live { token: token.clone(), expires, claimed_by: None });
        token
    }

    /// The token with this id, if `peer` may use it.
    pub(crate) fn find(&mut self, id: TokenId, peer: PeerId, now: Instant) -> Option<Token> {
        self.entry(id, peer, now).map(|live| live.token.clone())
    }

    /// `peer` has proven the token: no other peer may use it from here on.
    pub(crate) fn claim(&mut self, id: TokenId, peer: PeerId, now: Instant) -> bool {
        self.entry(id, peer, now).map(|live| live.claimed_by = Some(peer)).is_some()
    }

    /// The joined peer has the secret: the token is used up.
    pub(crate) fn consume(&mut self, id: TokenId) {
        self.live.retain(|live| live.token.id != id);
    }

    fn entry(&mut self, id: TokenId, peer: PeerId, now: Instant) -> Option<&mut Live> {
        self.expire(now);
        self.live
            .iter_mut()
            .find(|live| live.token.id == id && live.claimed_by.is_none_or(|other| other == peer))
    }

    fn expire(&mut self, now: Instant) {
        self.live.retain(|live| live.expires > now);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_token_survives_its_text_and_a_typing_error_is_found() {
        let token = Token::random();
        let text = token.expose_text();
        assert_eq!(text.len(), 44);
        assert_eq!(text.parse::<Token>().unwrap(), token);
        assert_eq!(text.to_uppercase().parse::<Token>().unwrap(), token);
        for at in 0..text.len() {
            let mut wrong = text.as_bytes().to_vec();
            wrong[at] = if wrong[at] == b'7' { b'8' } else { b'7' };
            assert!(String::from_utf8(wrong).unwrap().parse::<Token>().is_err(), "{at}");
        }
        assert!("weft".parse::<Token>().is_err());
        assert!("".parse::<Token>().is_err());
        assert!("weftää".parse::<Token>().is_err());
    }

    #[test]
    fn a_token_serves_one_peer_once_and_for_an_hour() {
        let now = Instant::now();
        let (one, other) = (PeerId::from_bytes([1; 32]), PeerId::from_bytes([2; 32]));
        let mut book = TokenBook::default();
        let token = book.create(now);
        assert!(book.find(token.id(), other, now).is_some());
        assert!(book.claim(token.id(), one, now));
        assert!(book.find(token.id(), other, now).is_none(), "claimed");
        assert!(book.find(token.id(), one, now).is_some(), "may try again");
        book.consume(token.id());
        assert!(book.find(token.id(), one, now).is_none(), "used");

        let token = book.create(now);
        let later = now + Duration::from_secs(TOKEN_LIFETIME_S);
        assert!(book.find(token.id(), one, later).is_none(), "expired");
    }

    #[test]
    fn the_number_of_live_tokens_is_bounded() {
        let now = Instant::now();
        let mut book = TokenBook::default();
        let first = book.create(now);
        for _ in 0..TOKENS_MAX {
            book.create(now);
        }
        assert_eq!(book.live.len(), TOKENS_MAX);
        assert!(book.find(first.id(), PeerId::from_bytes([1; 32]), now).is_none());
    }
}
