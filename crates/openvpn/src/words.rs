//! A line of a configuration, or a pushed option, as OpenVPN cuts it into words: quotes, backslashes, comments.
//!
//! Words are separated by white space. Within `"…"` and outside of quotes, a backslash takes the meaning from a white
//! space, a `"` and a backslash, and may stand before nothing else. Within `'…'` all characters stand for themselves.
//! A word that begins with `#` or `;` begins a comment.

/// The longest word, in bytes.
pub const WORD_BYTES_MAX: usize = 256;
/// Most words of a line.
pub const WORDS_MAX: usize = 16;

/// A line that cannot be cut into words: its author's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    /// A quote is not closed.
    #[error("a {0} has no second one: close the quotation")]
    Unclosed(char),
    /// A backslash before an ordinary character, or at the end.
    #[error("a backslash stands before no \", backslash or space: write \\\\ for a backslash")]
    Backslash,
    /// A word beyond the limit.
    #[error(
        "a word is longer than {WORD_BYTES_MAX} bytes: shorten it, or put it into a file or an inline block"
    )]
    LongWord,
    /// Too many words.
    #[error("the line has more than {WORDS_MAX} words: OpenVPN would drop the rest; shorten it")]
    ManyWords,
    /// A word to be written that no line can hold.
    #[error(
        "the word has a control character or more than {WORD_BYTES_MAX} bytes: no line can hold it"
    )]
    Unwritable,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Between,
    Plain,
    Quoted,
    Single,
}

/// Cuts a line into words.
///
/// # Errors
/// [`WordsError`]
pub fn split(line: &str) -> Result<Vec<String>, WordsError> {
    let mut words = Vec::new();
    let (mut word, mut state, mut escaped) = (String::new(), State::Between, false);
    // The end of the line ends a word as white space does.
    for char in line.chars().chain(['\0']) {
        if !escaped && char == '\\' && state != State::Single {
            escaped = true;
            continue;
        }
        let mut is_kept = false;
        let mut is_done = false;
        match state {
            State::Between if is_space(char) => {}
            State::Between if matches!(char, ';' | '#') => break,
            State::Between if !escaped && char == '"' => state = State::Quoted,
            State::Between if !escaped && char == '\'' => state = State::Single,
            State::Between => (state, is_kept) = (State::Plain, true),
            State::Plain if !escaped && is_space(char) => is_done = true,
            State::Quoted if !escaped && char == '"' => is_done = true,
            State::Single if char == '\'' => is_done = true,
            State::Plain | State::Quoted | State::Single => is_kept = true,
        }
        let is_end = char == '\0';
        if escaped && (is_end || is_kept && !(matches!(char, '\\' | '"') || is_space(char))) {
            return Err(WordsError::Backslash);
        }
        escaped = false;
        if is_done {
            if words.len() == WORDS_MAX {
                return Err(WordsError::ManyWords);
            }
            words.push(std::mem::take(&mut word));
            state = State::Between;
        } else if is_kept && !is_end {
            word.push(char);
            if word.len() > WORD_BYTES_MAX {
                return Err(WordsError::LongWord);
            }
        }
    }
    match state {
        State::Quoted => Err(WordsError::Unclosed('"')),
        State::Single => Err(WordsError::Unclosed('\'')),
        State::Between | State::Plain => Ok(words),
    }
}

/// A word as it can stand in a line: in quotes where it must be.
///
/// # Errors
/// [`WordsError::Unwritable`]
pub fn quote(word: &str) -> Result<String, WordsError> {
    if word.len() > WORD_BYTES_MAX || word.chars().any(char::is_control) {
        return Err(WordsError::Unwritable);
    }
    let special = |char: char| is_space(char) || matches!(char, '"' | '\'' | '\\');
    if !word.is_empty() && !word.contains(special) && !word.starts_with([';', '#']) {
        return Ok(word.to_owned());
    }
    let mut quoted = String::from("\"");
    for char in word.chars() {
        if matches!(char, '"' | '\\') {
            quoted.push('\\');
        }
        quoted.push(char);
    }
    quoted.push('"');
    Ok(quoted)
}

/// White space of C's locale, and the end of a string.
const fn is_space(char: char) -> bool {
    matches!(char, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r' | '\0')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_cut_as_openvpn_cuts_them() {
        for (line, words) in [
            ("port 1194", &["port", "1194"][..]),
            ("  proto\tudp # udp6 too", &["proto", "udp"]),
            ("; a comment", &[]),
            ("", &[]),
            ("push \"route 10.0.0.0 255.0.0.0\"", &["push", "route 10.0.0.0 255.0.0.0"]),
            (r#"ca "C:\\keys\\my \"ca\".crt""#, &["ca", r#"C:\keys\my "ca".crt"#]),
            (r"ca my\ ca.crt", &["ca", "my ca.crt"]),
            (r"up '/bin/echo \n' x#y;z", &["up", r"/bin/echo \n", "x#y;z"]),
            ("setenv A \"\"", &["setenv", "A", ""]),
            (r#"x \"y"#, &["x", "\"y"]),
            ("x a\"b", &["x", "a\"b"]),
            ("\"a\"\"b\"", &["a", "b"]),
        ] {
            assert_eq!(split(line).unwrap(), words, "{line}");
        }
    }

    #[test]
    fn lines_that_openvpn_refuses_are_refused() {
        assert_eq!(split("push \"route"), Err(WordsError::Unclosed('"')));
        assert_eq!(split("push 'route"), Err(WordsError::Unclosed('\'')));
        assert_eq!(split(r"ca C:\keys"), Err(WordsError::Backslash));
        assert_eq!(split("ca x\\"), Err(WordsError::Backslash));
        assert_eq!(split(&"x".repeat(WORD_BYTES_MAX + 1)), Err(WordsError::LongWord));
        assert_eq!(split(&"x ".repeat(WORDS_MAX + 1)), Err(WordsError::ManyWords));
        assert_eq!(quote("a\nb"), Err(WordsError::Unwritable));
    }

    proptest! {
        #[test]
        fn quoted_words_come_back(words in prop::collection::vec("[ -~äß]{0,20}", 1..WORDS_MAX)) {
            let line: Vec<String> = words.iter().map(|word| quote(word).unwrap()).collect();
            prop_assert_eq!(split(&line.join(" ")), Ok(words));
        }

        #[test]
        fn no_text_makes_it_panic(line in ".{0,80}") {
            let _ = split(&line);
        }
    }
}
