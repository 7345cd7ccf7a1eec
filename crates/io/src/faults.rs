//! Faults that a test asks a running daemon for, in builds with the feature `faults`. Released builds have none.
//!
//! The environment names a file with a fault a line, a word and its value. It is read each time, so that a test can
//! change its mind.

use std::fs;

/// Names the file.
pub const FAULTS_FILE: &str = "WEFT_FAULTS";

/// Set where tests run beside a build, which writes so much that a disk takes a second for each file that must outlast a
/// power cut.
pub const NO_POWER_CUT: &str = "WEFT_NO_POWER_CUT";

/// Whether a test says that no power cut comes.
#[must_use]
pub fn no_power_cut() -> bool {
    cfg!(feature = "faults") && std::env::var_os(NO_POWER_CUT).is_some()
}

/// The value of a fault that is asked for now.
#[must_use]
pub fn asked(name: &str) -> Option<String> {
    if !cfg!(feature = "faults") {
        return None;
    }
    value_in(&fs::read_to_string(std::env::var_os(FAULTS_FILE)?).ok()?, name)
}

fn value_in(text: &str, name: &str) -> Option<String> {
    let mut faults = text.lines().filter_map(|line| line.split_once(' '));
    faults.find(|(word, _)| *word == name).map(|(_, value)| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_a_line_with_a_word_and_its_value() {
        let text = "netlink-answer-ms 5000\npanic routes\n";
        assert_eq!(value_in(text, "netlink-answer-ms").as_deref(), Some("5000"));
        assert_eq!(value_in(text, "panic").as_deref(), Some("routes"));
        assert_eq!(value_in(text, "hang"), None);
    }
}
