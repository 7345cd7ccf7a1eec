//! A profile as a QR code in the terminal: its text, as short as a client can read it.

use std::fmt::Write as _;

use qrcode::render::unicode::Dense1x2;
use qrcode::{EcLevel, QrCode};
use rustix::termios::tcgetwinsize;
use zeroize::Zeroizing;

/// The most bytes of a QR code: version 40, level L (ISO/IEC 18004, table 7).
const CODE_BYTES_MAX: usize = 2_953;
/// Directives that a client goes without: how much it logs, for how long it looks names up, and keys in its memory.
const LEFT_OUT: [&str; 3] = ["verb", "resolv-retry", "persist-key"];
/// Black and bright white, whatever the terminal's colours are; and back.
const COLOURS: (&str, &str) = ("\x1b[40;97m", "\x1b[0m");

/// A profile is not shown as a QR code.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum QrError {
    /// It is too long.
    #[error(
        "the profile has {bytes} bytes without all that a client can do without, and a QR code holds {CODE_BYTES_MAX}: \
         bring it as a file (weft openvpn client NAME > NAME.ovpn); with elliptic keys, or for all users (--shared), it is shorter"
    )]
    TooLong {
        /// Its bytes.
        bytes: usize,
    },
    /// The terminal is too small.
    #[error(
        "the QR code needs {columns} columns and {rows} rows, the terminal has {has_columns} and {has_rows}: \
         make its letters smaller, and run this again"
    )]
    NoRoom {
        /// Columns that the code needs.
        columns: usize,
        /// Rows that the code needs.
        rows: usize,
        /// Columns that there are.
        has_columns: u16,
        /// Rows that there are.
        has_rows: u16,
    },
    /// The library does not make it.
    #[error("no QR code can be made: {0}")]
    Library(qrcode::types::QrError),
}

/// The text of a profile without all that a client can do without: comments, what is outside of PEM, and directives
/// that change nothing about the connection.
pub fn compact(profile: &str) -> Zeroizing<String> {
    let mut out = Zeroizing::new(String::with_capacity(profile.len()));
    let (mut is_in_block, mut is_in_pem) = (false, false);
    for line in profile.lines().map(str::trim) {
        let is_end = line.starts_with("</");
        if line.starts_with('<') {
            is_in_block = !is_end;
        }
        is_in_pem |= line.starts_with("-----BEGIN ");
        let name = line.split_whitespace().next().unwrap_or_default();
        let is_kept = match is_in_block && !line.starts_with('<') {
            true => is_in_pem,
            false => !line.is_empty() && !line.starts_with(['#', ';']) && !LEFT_OUT.contains(&name),
        };
        if is_kept {
            out.push_str(line);
            out.push('\n');
        }
        is_in_pem &= !line.starts_with("-----END ");
    }
    out
}

/// The QR code of a text, in lines of half blocks: light on a dark ground.
///
/// # Errors
/// [`QrError::TooLong`]
pub fn code(text: &str) -> Result<String, QrError> {
    let bytes = text.len();
    if bytes > CODE_BYTES_MAX {
        return Err(QrError::TooLong { bytes });
    }
    let code = QrCode::with_error_correction_level(text, EcLevel::L).map_err(QrError::Library)?;
    // The characters are light on dark: the code's dark is the terminal's ground.
    let mut image = code.render::<Dense1x2>();
    Ok(image.dark_color(Dense1x2::Light).light_color(Dense1x2::Dark).build())
}

/// The code of a profile for the terminal that standard output is, in colours; as plain text if it is none.
///
/// # Errors
/// [`QrError`]
pub fn shown(profile: &str) -> Result<String, QrError> {
    let code = code(&compact(profile))?;
    let Ok(size) = tcgetwinsize(std::io::stdout()) else { return Ok(code) };
    let columns = code.lines().next().map_or(0, |line| line.chars().count());
    let rows = code.lines().count();
    let (has_columns, has_rows) = (size.ws_col, size.ws_row);
    if columns > usize::from(has_columns) || rows > usize::from(has_rows) {
        return Err(QrError::NoRoom { columns, rows, has_columns, has_rows });
    }
    let mut text = String::with_capacity(code.len() * 2);
    let (begin, end) = COLOURS;
    for line in code.lines() {
        let _ = writeln!(text, "{begin}{line}{end}");
    }
    Ok(text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PROFILE: &str = "# alice, for Weft. It holds a private key: keep it secret.\nclient\ndev tun\n\
        remote vpn.example.net 1194 udp\nresolv-retry infinite\nnobind\npersist-key\npersist-tun\n\
        remote-cert-tls server\nverify-x509-name gateway name\nverb 3\n<ca>\nCertificate:\n  Data: it is\n\
        -----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n</ca>\n<tls-auth>\n#\n# 2048 bit key\n#\n\
        -----BEGIN OpenVPN Static key V1-----\n0123\n-----END OpenVPN Static key V1-----\n</tls-auth>\n";

    #[test]
    fn a_profile_keeps_what_makes_the_connection() {
        let text = compact(PROFILE);
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "client",
                "dev tun",
                "remote vpn.example.net 1194 udp",
                "nobind",
                "persist-tun",
                "remote-cert-tls server",
                "verify-x509-name gateway name",
                "<ca>",
                "-----BEGIN CERTIFICATE-----",
                "MIIB",
                "-----END CERTIFICATE-----",
                "</ca>",
                "<tls-auth>",
                "-----BEGIN OpenVPN Static key V1-----",
                "0123",
                "-----END OpenVPN Static key V1-----",
                "</tls-auth>",
            ]
        );
    }

    #[test]
    fn what_does_not_fit_is_told_with_its_size() {
        let error = code(&"x".repeat(CODE_BYTES_MAX + 1)).unwrap_err().to_string();
        assert!(error.contains("2954 bytes") && error.contains("holds 2953"), "{error}");
        assert!(code(&"x".repeat(CODE_BYTES_MAX)).is_ok());
    }
}
