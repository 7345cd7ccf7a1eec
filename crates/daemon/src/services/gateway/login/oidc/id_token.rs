//! Whether an ID token is the provider's, for this gateway, for this login, and of now.
//!
//! OpenID Connect Core 1.0, section 3.1.3.7. `jsonwebtoken` checks signature, expiry and audience, by aws-lc-rs; the rest
//! is here. A key of symmetric algorithms, or of none, never counts.

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde_json::{Map, Value};

/// Algorithms by which a token may be signed: those of public keys.
const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];
/// How far the provider's clock may be from this host's, in seconds.
const CLOCKS_S: u64 = 60;

/// The claims of a token, by name.
pub(super) type Claims = Map<String, Value>;

/// The values that a token must have.
pub(super) struct Expected<'a> {
    pub(super) issuer: &'a str,
    pub(super) client_id: &'a str,
    pub(super) nonce: &'a str,
}

/// A token that proves nothing: the provider's fault, or a forgery.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super::super) enum TokenFault {
    /// It is no token.
    #[error("the ID token cannot be read: {0}")]
    Malformed(String),
    /// Signed by an algorithm that is not taken, or not by the provider's keys.
    #[error("the ID token is signed by {0}, which is not taken")]
    Algorithm(String),
    /// None of the provider's keys; they may have been changed.
    #[error("the ID token is signed by a key that the provider does not publish")]
    UnknownKey,
    /// The signature is none.
    #[error("the ID token's signature is wrong")]
    Signature,
    /// Another provider's.
    #[error("the ID token is of another issuer")]
    Issuer,
    /// For another program.
    #[error("the ID token is for another client")]
    Audience,
    /// Of another login.
    #[error("the ID token is of another login")]
    Nonce,
    /// Its time is over, or has not come.
    #[error("the ID token is not of now: compare the clocks of this host and of the provider")]
    Time,
    /// A claim that must be there.
    #[error("the ID token has no {0}")]
    Missing(String),
}

impl TokenFault {
    /// Whether the token may be good by keys that the provider has published since. A token may name no key, and a new
    /// key may have the name of an old one.
    pub(super) const fn may_be_of_other_keys(&self) -> bool {
        matches!(self, Self::UnknownKey | Self::Signature)
    }
}

/// The claims of a token, once it is found to be good.
///
/// # Errors
/// [`TokenFault`]
pub(super) fn verify(
    token: &str,
    keys: &JwkSet,
    expected: &Expected<'_>,
) -> Result<Claims, TokenFault> {
    let header = decode_header(token).map_err(|error| fault(error.kind()))?;
    if !ALGORITHMS.contains(&header.alg) {
        return Err(TokenFault::Algorithm(format!("{:?}", header.alg)));
    }
    let mut validation = Validation::new(header.alg);
    validation.set_issuer(&[expected.issuer]);
    validation.set_audience(&[expected.client_id]);
    validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
    validation.validate_nbf = true;
    validation.leeway = CLOCKS_S;
    let mut last = TokenFault::UnknownKey;
    for key in fitting(keys, header.kid.as_deref(), header.alg) {
        match decode::<Claims>(token, &key, &validation) {
            Ok(data) => return judged(data.claims, expected),
            Err(error) => last = fault(error.kind()),
        }
    }
    Err(last)
}

/// The keys that a token may be signed by: the one that it names, or all if it names none.
fn fitting(
    keys: &JwkSet,
    name: Option<&str>,
    algorithm: Algorithm,
) -> impl Iterator<Item = DecodingKey> {
    let is_its = move |key: &&Jwk| {
        let is_named = name.is_none_or(|name| key.common.key_id.as_deref() == Some(name));
        is_named && !matches!(key.common.public_key_use, Some(PublicKeyUse::Encryption))
    };
    let keys = keys.keys.iter().filter(is_its).filter_map(|key| DecodingKey::from_jwk(key).ok());
    keys.filter(move |key| key.family() == algorithm.family())
}

/// What the library does not ask.
fn judged(claims: Claims, expected: &Expected<'_>) -> Result<Claims, TokenFault> {
    let text = |name: &str| claims.get(name).and_then(Value::as_str);
    // The library takes a list of issuers, too.
    if text("iss") != Some(expected.issuer) {
        return Err(TokenFault::Issuer);
    }
    let is_for_several =
        claims.get("aud").and_then(Value::as_array).is_some_and(|all| all.len() > 1);
    let is_its = match text("azp") {
        Some(party) => party == expected.client_id,
        None => !is_for_several && !claims.contains_key("azp"),
    };
    if !is_its {
        return Err(TokenFault::Audience);
    }
    if text("nonce") != Some(expected.nonce) {
        return Err(TokenFault::Nonce);
    }
    if text("sub").is_none_or(str::is_empty) {
        return Err(TokenFault::Missing("sub".into()));
    }
    Ok(claims)
}

fn fault(kind: &ErrorKind) -> TokenFault {
    match kind {
        ErrorKind::InvalidSignature => TokenFault::Signature,
        ErrorKind::InvalidIssuer => TokenFault::Issuer,
        ErrorKind::InvalidAudience => TokenFault::Audience,
        ErrorKind::ExpiredSignature | ErrorKind::ImmatureSignature => TokenFault::Time,
        ErrorKind::MissingRequiredClaim(name) => TokenFault::Missing(name.clone()),
        other => TokenFault::Malformed(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests;
