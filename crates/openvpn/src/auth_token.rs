//! Tokens in the place of passwords, as `auth-gen-token` makes them: one that a server has signed, and that it, or
//! another server with the same key, takes instead of the password when a session renews its keys or moves.
//!
//! `SESS_ID_AT_` and base64 of: session 12 | time of the login 8 | time of the token 8 | HMAC-SHA256 32. Times are Unix
//! seconds, big-endian. The HMAC is over the user name and the three before it.

use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::messages::Secret;
use crate::static_key::AuthTokenKey;

/// How every token begins.
pub const TOKEN_PREFIX: &str = "SESS_ID_AT_";
/// Bytes of a token's session.
pub const TOKEN_SESSION_BYTES: usize = 12;
/// The text that follows `SESSION:` in AUTH_FAILED when a token is no longer good.
pub const EXPIRED_TEXT: &str = "token expired";

const TIME_BYTES: usize = 8;
const HMAC_BYTES: usize = 32;
const SIGNED_BYTES: usize = TOKEN_SESSION_BYTES + 2 * TIME_BYTES;
/// Bytes of the key that HMAC-SHA256 takes.
const KEY_BYTES: usize = 32;

/// Makes and checks tokens.
pub struct TokenSigner {
    key: hmac::Key,
    lifetime_s: Option<u64>,
    renewal_s: u64,
}

/// What a token is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenIdentity {
    /// A name of the session: random, and kept for as long as its tokens are renewed.
    pub session: [u8; TOKEN_SESSION_BYTES],
    /// When the user gave the password, in Unix seconds.
    pub login_s: u64,
}

/// A token that this server, or another with its key, has signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidToken {
    /// For the next token.
    pub identity: TokenIdentity,
    /// When the token was made, in Unix seconds.
    pub made_s: u64,
    /// It was signed for no user name: whatever name came with it is not to be trusted.
    pub is_for_empty_user: bool,
    /// It is too old, or from the future: the user gives the password again.
    pub is_expired: bool,
}

/// A password that has the form of a token, and is none: the user's fault, or he is no longer known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Not base64 of the right length.
    #[error("the token is cut short or altered: give the password again")]
    Malformed,
    /// The HMAC is another.
    #[error("the token was signed by another key or for another user: give the password again")]
    Unsigned,
}

impl TokenSigner {
    /// A signer whose tokens are good for `lifetime_s` after the login (`None`: for ever), and each for two times
    /// `renewal_s` after it was made. OpenVPN's renewal is its `reneg-sec`, unless it is given.
    pub fn new(key: &AuthTokenKey, lifetime_s: Option<u64>, renewal_s: u64) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key.hmac_key()[..KEY_BYTES]);
        Self { key, lifetime_s, renewal_s }
    }

    /// Whether a password is to be checked as a token.
    pub fn is_token(password: &str) -> bool {
        password.starts_with(TOKEN_PREFIX)
    }

    /// A token for a user, at a time in Unix seconds.
    pub fn sign(&self, user: &str, identity: TokenIdentity, now_s: u64) -> Secret {
        let mut bytes = [0; SIGNED_BYTES + HMAC_BYTES];
        let signed = signed_bytes(identity, now_s);
        bytes[..SIGNED_BYTES].copy_from_slice(&signed);
        let mut context = hmac::Context::with_key(&self.key);
        context.update(user.as_bytes());
        context.update(&signed);
        bytes[SIGNED_BYTES..].copy_from_slice(context.sign().as_ref());
        Secret::new(format!("{TOKEN_PREFIX}{}", STANDARD.encode(bytes)))
    }

    /// Checks a token that came with a user name.
    ///
    /// # Errors
    /// [`TokenError`]
    pub fn verify(&self, user: &str, token: &str, now_s: u64) -> Result<ValidToken, TokenError> {
        let digits = token.strip_prefix(TOKEN_PREFIX).ok_or(TokenError::Malformed)?;
        let bytes = STANDARD.decode(digits).map_err(|_| TokenError::Malformed)?;
        if bytes.len() != SIGNED_BYTES + HMAC_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, tag) = bytes.split_at(SIGNED_BYTES);
        let is_for_empty_user = if self.is_signed(user, signed, tag) {
            false
        } else if self.is_signed("", signed, tag) {
            true
        } else {
            return Err(TokenError::Unsigned);
        };
        let mut fields = signed;
        let session = cut(&mut fields)?;
        let login_s = u64::from_be_bytes(cut(&mut fields)?);
        let made_s = u64::from_be_bytes(cut(&mut fields)?);
        let renewal_end = made_s.saturating_add(self.renewal_s.saturating_mul(2));
        let is_old = self.lifetime_s.is_some_and(|life| now_s > login_s.saturating_add(life));
        let is_expired = now_s < made_s || now_s >= renewal_end || made_s < login_s || is_old;
        let identity = TokenIdentity { session, login_s };
        Ok(ValidToken { identity, made_s, is_for_empty_user, is_expired })
    }

    fn is_signed(&self, user: &str, signed: &[u8], tag: &[u8]) -> bool {
        let message = [user.as_bytes(), signed].concat();
        hmac::verify(&self.key, &message, tag).is_ok()
    }
}

impl std::fmt::Debug for TokenSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenSigner")
            .field("lifetime_s", &self.lifetime_s)
            .field("renewal_s", &self.renewal_s)
            .finish_non_exhaustive()
    }
}

fn signed_bytes(identity: TokenIdentity, made_s: u64) -> [u8; SIGNED_BYTES] {
    let mut signed = [0; SIGNED_BYTES];
    let (session, times) = signed.split_at_mut(TOKEN_SESSION_BYTES);
    session.copy_from_slice(&identity.session);
    let (login, made) = times.split_at_mut(TIME_BYTES);
    login.copy_from_slice(&identity.login_s.to_be_bytes());
    made.copy_from_slice(&made_s.to_be_bytes());
    signed
}

fn cut<const N: usize>(fields: &mut &[u8]) -> Result<[u8; N], TokenError> {
    let (first, rest) = fields.split_first_chunk::<N>().ok_or(TokenError::Malformed)?;
    *fields = rest;
    Ok(*first)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const RENEWAL_S: u64 = 3_600;

    fn signer(key: u8) -> TokenSigner {
        TokenSigner::new(&AuthTokenKey::new([key; 128]), Some(36_000), RENEWAL_S)
    }

    fn identity() -> TokenIdentity {
        TokenIdentity { session: *b"twelve bytes", login_s: 10_000 }
    }

    /// A known token of OpenVPN's own unit tests (test_auth_token): a key of zeros, time 0.
    #[test]
    fn tokens_are_those_of_openvpn() {
        let token = "SESS_ID_AT_0123456789abcdefAAAAAAAAAAAAAAAAAAAAAE5JsQJOVfo8jnI3RL3tBaR5\
                     NkE4yPfcylFUHmHSc5Bu";
        let valid = signer(0).verify("test user name", token, 0).unwrap();
        assert!(!valid.is_expired && !valid.is_for_empty_user);
        assert_eq!(signer(0).sign("test user name", valid.identity, 0).expose(), token);
    }

    #[test]
    fn a_token_is_good_for_its_user_and_its_time() {
        let (signer, identity) = (signer(1), identity());
        let token = signer.sign("anna", identity, 20_000);
        let verify = |user: &str, now_s| signer.verify(user, token.expose(), now_s);
        let valid = verify("anna", 20_000).unwrap();
        assert_eq!((valid.identity, valid.made_s, valid.is_expired), (identity, 20_000, false));
        assert!(!verify("anna", 27_199).unwrap().is_expired);
        assert!(verify("anna", 27_200).unwrap().is_expired, "two renewals later");
        assert!(verify("anna", 19_999).unwrap().is_expired, "from the future");
        assert_eq!(verify("berta", 20_000), Err(TokenError::Unsigned));
        let late = signer.sign("anna", identity, 46_000);
        assert!(!signer.verify("anna", late.expose(), 46_000).unwrap().is_expired);
        assert!(signer.verify("anna", late.expose(), 46_001).unwrap().is_expired, "lifetime");
        let early = signer.sign("anna", identity, 9_999);
        assert!(
            signer.verify("anna", early.expose(), 9_999).unwrap().is_expired,
            "before the login"
        );
        let other = TokenSigner::new(&AuthTokenKey::new([2; 128]), None, RENEWAL_S);
        assert_eq!(other.verify("anna", token.expose(), 20_000), Err(TokenError::Unsigned));
    }

    #[test]
    fn a_token_for_no_user_says_so() {
        let signer = signer(1);
        let token = signer.sign("", identity(), 20_000);
        assert!(signer.verify("anna", token.expose(), 20_000).unwrap().is_for_empty_user);
        assert!(!signer.verify("", token.expose(), 20_000).unwrap().is_for_empty_user);
        assert!(TokenSigner::is_token(token.expose()) && !TokenSigner::is_token("secret"));
        assert!(!format!("{signer:?} {token:?}").contains("SESS"));
    }

    proptest! {
        #[test]
        fn no_altered_token_is_good(at in 0_usize..91, digit in "[ -~]", junk in ".{0,60}") {
            let (signer, user) = (signer(3), "anna");
            let token = signer.sign(user, identity(), 20_000);
            let mut altered = token.expose().to_owned();
            altered.replace_range(at..=at, &digit);
            if altered != token.expose() {
                prop_assert!(signer.verify(user, &altered, 20_000).is_err());
            }
            let junk = format!("{TOKEN_PREFIX}{junk}");
            prop_assert!(signer.verify(user, &junk, 20_000).is_err());
        }
    }
}
