//! Names of containers, which other hosts and terminals show.

use weft_api::{ApiError, ErrorKind};

/// Characters of an invalid name that an error shows.
const SHOWN_CHARS_MAX: usize = 64;

/// Rejects a name that other hosts would not accept.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), ApiError> {
    let max = weft_mesh::limits::NAME_BYTES_MAX;
    if !name.is_empty() && name.len() <= max && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let shown: String = name.chars().take(SHOWN_CHARS_MAX).collect();
    let text = format!(
        "a container's {what} must have 1 to {max} bytes without control characters; that of {} has {} bytes: choose another name",
        printable(&shown),
        name.len()
    );
    Err(ApiError::new(ErrorKind::BadRequest, text))
}

/// The further names that DNS takes, as other hosts accept them. Those that are no names in DNS are left out, and those
/// beyond the limit.
pub(super) fn fit_aliases(aliases: &[String]) -> Vec<String> {
    let mut fit: Vec<String> = Vec::new();
    for alias in aliases {
        let alias = alias.to_ascii_lowercase();
        let is_new = weft_mesh::is_dns_name(&alias) && !fit.contains(&alias);
        if is_new && fit.len() < weft_mesh::limits::ALIASES_PER_ENDPOINT_MAX {
            fit.push(alias);
        }
    }
    fit
}

/// Makes a name fit to show and announce: escapes control characters and truncates it.
pub(super) fn printable(name: &str) -> String {
    let mut shown = String::new();
    for char in name.chars() {
        let next = match char.is_control() {
            true => char.escape_default().to_string(),
            false => char.to_string(),
        };
        if shown.len() + next.len() > weft_mesh::limits::NAME_BYTES_MAX {
            break;
        }
        shown.push_str(&next);
    }
    shown
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn names_that_no_host_would_take_are_refused_and_written_out() {
        for good in ["web", "a b", "\u{e9}", &"x".repeat(255)] {
            check_name("name", good).unwrap();
            assert_eq!(printable(good), good);
        }
        for bad in ["", "a\u{1b}[31mb", "a\nb", &"x".repeat(256)] {
            let text = check_name("name", bad).unwrap_err().to_string();
            assert!(text.contains("1 to 255 bytes") && !text.contains('\u{1b}'), "{text}");
        }
        assert_eq!(printable("a\u{1b}[31m\n"), "a\\u{1b}[31m\\n");
        assert_eq!(printable(&"\n".repeat(300)).len(), 254);
    }

    #[test]
    fn aliases_are_names_in_dns_each_once_and_not_too_many() {
        let some = ["db", "DB", "a b", "", "my_db.prod"].map(str::to_owned);
        assert_eq!(fit_aliases(&some), ["db", "my_db.prod"]);
        let many: Vec<String> = (0..100).map(|n| format!("a{n}")).collect();
        let fit = fit_aliases(&many);
        assert_eq!(fit, many[..weft_mesh::limits::ALIASES_PER_ENDPOINT_MAX]);
    }
}
