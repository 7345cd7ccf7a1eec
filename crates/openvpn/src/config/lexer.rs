//! From the text of a configuration file to its directives.

use std::fmt;

use zeroize::Zeroizing;

use crate::words::{self, WordsError};

/// The longest file, in bytes.
pub const CONFIG_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Most directives of a file.
pub const DIRECTIVES_MAX: usize = 16_384;
/// The longest line outside of a block, in bytes.
pub const LINE_BYTES_MAX: usize = 4_096;
/// The longest block, in bytes.
pub const BLOCK_BYTES_MAX: usize = 1024 * 1024;

/// A line that is no directive: its author's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LineError {
    /// It cannot be cut into words.
    #[error(transparent)]
    Words(#[from] WordsError),
    /// A line beyond the limit.
    #[error("the line is longer than {LINE_BYTES_MAX} bytes: shorten it")]
    LongLine,
    /// A block that does not end.
    #[error("the block has no </{0}>: add it")]
    OpenBlock(String),
    /// A block beyond the limit.
    #[error("the block <{0}> is longer than {BLOCK_BYTES_MAX} bytes: name a file instead")]
    LongBlock(String),
    /// A byte that no text has.
    #[error("the line has a NUL or another control character: remove it")]
    Control,
    /// Too many.
    #[error("the file has more than {DIRECTIVES_MAX} directives: the rest is not read")]
    TooMany,
    /// The file is too long.
    #[error("the file is longer than {CONFIG_BYTES_MAX} bytes: it is not read")]
    LongFile,
}

/// A directive with its values, or with the block that stands in the place of a file. Blocks may hold keys, so they
/// are not shown.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Directive {
    /// The line of its name, from 1.
    pub line: usize,
    /// Its name, without leading `--`.
    pub name: String,
    /// Its values.
    pub values: Vec<String>,
    /// The text between `<name>` and `</name>`.
    pub block: Option<Zeroizing<String>>,
}

impl Directive {
    /// The directive as one line, for a report. The values of those that carry a secret are left out.
    pub(super) fn shown(&self) -> String {
        if self.block.is_some() {
            return format!("<{}>", self.name);
        }
        let has_secret = matches!(self.name.as_str(), "auth-token" | "management-external-key");
        let values = if has_secret { &[][..] } else { &self.values[..] };
        values.iter().fold(self.name.clone(), |line, value| {
            let quoted = words::quote(value).unwrap_or_else(|_| "…".to_owned());
            line + " " + &quoted
        })
    }
}

impl fmt::Debug for Directive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.line, self.shown())
    }
}

/// A line with its number, from 1, that is no directive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BadLine {
    /// Its number.
    pub line: usize,
    /// What is wrong.
    pub error: LineError,
}

/// Reads a file. Lines that are no directive come back beside the directives, in their order.
pub(super) fn read(text: &str) -> Vec<Result<Directive, BadLine>> {
    if text.len() > CONFIG_BYTES_MAX {
        return vec![Err(BadLine { line: 1, error: LineError::LongFile })];
    }
    let mut read = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut lines = (1..).zip(text.lines());
    while let Some((line, content)) = lines.next() {
        let directive = match words_of(content) {
            Ok(words) if words.is_empty() => continue,
            Ok(words) => directive(line, words, &mut lines),
            Err(error) => Err(error),
        };
        if read.len() == DIRECTIVES_MAX {
            read.push(Err(BadLine { line, error: LineError::TooMany }));
            break;
        }
        read.push(directive.map_err(|error| BadLine { line, error }));
    }
    read
}

fn words_of(line: &str) -> Result<Vec<String>, LineError> {
    if line.len() > LINE_BYTES_MAX {
        return Err(LineError::LongLine);
    }
    let words = words::split(line)?;
    if words.iter().any(|word| word.chars().any(|char| char.is_control() && char != '\t')) {
        return Err(LineError::Control);
    }
    Ok(words)
}

fn directive<'a>(
    line: usize,
    mut words: Vec<String>,
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Result<Directive, LineError> {
    let first = words.remove(0);
    let block_name = first.strip_prefix('<').and_then(|name| name.strip_suffix('>'));
    match block_name.filter(|_| words.is_empty()) {
        Some(name) => {
            let block = block(name, lines)?;
            Ok(Directive { line, name: name.to_owned(), values: Vec::new(), block: Some(block) })
        }
        None => {
            let name = first.strip_prefix("--").unwrap_or(&first).to_owned();
            Ok(Directive { line, name, values: words, block: None })
        }
    }
}

fn block<'a>(
    name: &str,
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Result<Zeroizing<String>, LineError> {
    let end = format!("</{name}>");
    let mut block = Zeroizing::new(String::new());
    let mut is_long = false;
    for (_, content) in lines {
        if content.trim_start().starts_with(&end) {
            return if is_long { Err(LineError::LongBlock(name.to_owned())) } else { Ok(block) };
        }
        // The rest of a long block is read over, so that its lines are not taken for directives.
        is_long |= block.len() + content.len() >= BLOCK_BYTES_MAX;
        if !is_long {
            block.push_str(content);
            block.push('\n');
        }
    }
    Err(LineError::OpenBlock(name.to_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn directives_have_their_lines_and_blocks() {
        let text = "\u{feff}port 1194\r\n\n# comment\n--proto udp\n<ca>\nA\n # B\n  </ca>\npush \"route 10.0.0.0\"\n";
        let read: Vec<Directive> = read(text).into_iter().map(Result::unwrap).collect();
        let shown: Vec<(usize, String)> =
            read.iter().map(|directive| (directive.line, directive.shown())).collect();
        let expected =
            [(1, "port 1194"), (4, "proto udp"), (5, "<ca>"), (9, "push \"route 10.0.0.0\"")];
        assert_eq!(shown, expected.map(|(line, text)| (line, text.to_owned())));
        assert_eq!(read[2].block.as_deref().unwrap(), "A\n # B\n");
        assert!(!format!("{read:?}").contains("# B"));
    }

    #[test]
    fn bad_lines_do_not_hide_the_others() {
        let long = "x".repeat(LINE_BYTES_MAX + 1);
        let text = format!("push \"a\nport 1\n{long}\nca C:\\x\nb\x07\n<key>\nx\n");
        let errors: Vec<(usize, LineError)> = read(&text)
            .into_iter()
            .filter_map(Result::err)
            .map(|bad| (bad.line, bad.error))
            .collect();
        let expected = [
            (1, LineError::Words(WordsError::Unclosed('"'))),
            (3, LineError::LongLine),
            (4, LineError::Words(WordsError::Backslash)),
            (5, LineError::Control),
            (6, LineError::OpenBlock("key".to_owned())),
        ];
        assert_eq!(errors, expected);
        let long = format!("<ca>\n{}</ca>\nport 1\n", "line\n".repeat(BLOCK_BYTES_MAX / 5 + 1));
        let read = read(&long);
        assert!(matches!(&read[0], Err(BadLine { error: LineError::LongBlock(_), .. })));
        assert_eq!(read[1].as_ref().unwrap().name, "port");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[ -~\n<>/\"'\\\\]{0,200}") {
            let _ = read(&text);
        }
    }
}
