//! Helpers of this crate's tests.
#![allow(clippy::unwrap_used)]

/// Bytes from hexadecimal digits; white space between them is skipped.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    assert_eq!(digits.len() % 2, 0, "whole bytes");
    digits
        .chunks_exact(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// As [`hex`], of a known length.
pub(crate) fn hex_array<const N: usize>(text: &str) -> [u8; N] {
    hex(text).try_into().unwrap()
}

/// The plaintext of OpenVPN's own tests of the data channel (`test_ssl.c`).
pub(crate) const OPENVPN_PLAINTEXT: &str =
    "54686520717569636b206c6974746c6520666f78206a756d7073206f76657220
     7468652062757265617563726174696320687572646c6573";

/// The key block of the same tests.
pub(crate) fn openvpn_key_block() -> [u8; 256] {
    let text = b"abcdefgh01234567ABCDEFGHjkuchenl";
    std::array::from_fn(|at| text[at % 32] ^ at as u8)
}
