//! One-time codes by time (RFC 6238): HMAC-SHA-1, six digits, steps of 30 seconds, which every authenticator has.
//!
//! The ten lines of RFC 4226 stand here, over the house's library of cryptography: which step a code is of must be
//! known, so that it is taken once.

use std::fmt::Write as _;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::hmac;
use data_encoding::BASE32_NOPAD;
use zeroize::Zeroizing;

/// Bytes of a secret: as many as SHA-1 has (RFC 4226, section 4).
pub(super) const SECRET_BYTES: usize = 20;
/// Seconds of a step.
pub(super) const STEP_S: u64 = 30;
/// Steps before and behind the present one whose codes are taken: clocks differ, and people type slowly.
pub(super) const STEPS_AROUND: u64 = 1;
const DIGITS: usize = 6;
const MODULUS: u32 = 1_000_000;
/// The issuer that an authenticator shows.
const ISSUER: &str = "Weft";

/// A new secret, in base32.
pub(super) fn new_secret() -> Zeroizing<String> {
    let mut secret = Zeroizing::new([0_u8; SECRET_BYTES]);
    rand::fill(&mut secret[..]);
    Zeroizing::new(BASE32_NOPAD.encode(&*secret))
}

/// The step of a code, if it is one of about now; `None` also for a secret that is not base32.
pub(super) fn step_of(code: &str, secret: &str, unix_s: u64) -> Option<u64> {
    let typed: String = code.chars().filter(|char| !char.is_whitespace()).collect();
    let secret = Zeroizing::new(BASE32_NOPAD.decode(secret.as_bytes()).ok()?);
    let now = unix_s / STEP_S;
    let steps = now.saturating_sub(STEPS_AROUND)..=now.saturating_add(STEPS_AROUND);
    // All of them, so that the time says nothing.
    let mut found = None;
    for step in steps {
        let right = code_at(&secret, step);
        if verify_slices_are_equal(right.as_bytes(), typed.as_bytes()).is_ok() {
            found = Some(step);
        }
    }
    found
}

/// What an authenticator takes, mostly as a QR code.
pub(super) fn otpauth(user: &str, host: &str, secret: &str) -> Zeroizing<String> {
    let (user, host) = (escaped(user), escaped(host));
    Zeroizing::new(format!(
        "otpauth://totp/{ISSUER}%20{host}:{user}?secret={secret}&issuer={ISSUER}%20{host}&algorithm=SHA1&digits={DIGITS}&period={STEP_S}"
    ))
}

fn code_at(secret: &[u8], step: u64) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, secret);
    let tag = hmac::sign(&key, &step.to_be_bytes());
    let tag = tag.as_ref();
    let at = usize::from(tag.last().copied().unwrap_or_default() & 0x0f);
    let bytes = tag.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default();
    let number = u32::from_be_bytes(bytes) & 0x7fff_ffff;
    format!("{:0DIGITS$}", number % MODULUS)
}

/// A text in a URI.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => out.push(byte.into()),
            _ => _ = write!(out, "%{byte:02X}"),
        }
    }
    out
}

/// The code of now, as an authenticator makes it.
#[cfg(test)]
pub(super) fn code_now(secret: &str, unix_s: u64) -> String {
    let secret = BASE32_NOPAD.decode(secret.as_bytes()).unwrap_or_default();
    code_at(&secret, unix_s / STEP_S)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// RFC 6238, appendix B, SHA-1: the last six of its eight digits.
    const KNOWN: [(u64, &str); 6] = [
        (59, "287082"),
        (1_111_111_109, "081804"),
        (1_111_111_111, "050471"),
        (1_234_567_890, "005924"),
        (2_000_000_000, "279037"),
        (20_000_000_000, "353130"),
    ];

    fn secret() -> String {
        BASE32_NOPAD.encode(b"12345678901234567890")
    }

    #[test]
    fn codes_are_those_of_the_rfc() {
        for (unix_s, code) in KNOWN {
            assert_eq!(step_of(code, &secret(), unix_s), Some(unix_s / STEP_S), "{unix_s}");
        }
        // As authenticators show it.
        assert_eq!(step_of(" 287 082\n", &secret(), 59), Some(1));
    }

    #[test]
    fn a_code_is_good_around_its_step_and_never_else() {
        let good = |unix_s| step_of("287082", &secret(), unix_s).is_some();
        assert!(good(0) && good(30) && good(89));
        assert!(!good(90) && !good(1_000_000));
        for wrong in ["", "287083", "28708", "2870822", "287082287082"] {
            assert_eq!(step_of(wrong, &secret(), 59), None, "{wrong}");
        }
        assert_eq!(step_of("287082", "not base32!", 59), None);
    }

    #[test]
    fn an_authenticator_gets_a_uri() {
        let (one, two) = (new_secret(), new_secret());
        assert_ne!(one, two);
        assert_eq!(one.len(), 32);
        let uri = otpauth("anna", "host 1", &secret());
        assert_eq!(
            uri.as_str(),
            "otpauth://totp/Weft%20host%201:anna?secret=GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ&issuer=Weft%20host%201&algorithm=SHA1&digits=6&period=30"
        );
    }
}
