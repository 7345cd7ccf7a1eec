//! Pushed options: cut into messages, and put together again.

use std::fmt;

use super::MessageError;

/// The longest push message that a server sends, in bytes with its NUL, as OpenVPN's.
pub const PUSH_MESSAGE_BYTES_MAX: usize = 1024;
/// The longest pushed option, in bytes: OpenVPN's clients take no longer one.
pub const PUSH_OPTION_BYTES_MAX: usize = 255;
/// Most options that a client takes.
pub const PUSH_OPTIONS_MAX: usize = 8_192;
/// Most bytes of options that a client takes.
pub const PUSH_BYTES_MAX: usize = 512 * 1024;

/// Room for what tells the parts of a push.
const CONTINUATION: &str = "push-continuation ";
const CONTINUATION_BYTES: usize = ",push-continuation 2".len();

/// Whether more parts follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Continuation {
    /// The message is all.
    #[default]
    Whole,
    /// The last of several (`push-continuation 1`).
    Last,
    /// More follow (`push-continuation 2`).
    More,
}

/// One message of a push. Its options may hold a token, so they are not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PushPart {
    /// The options, without `push-continuation`.
    pub options: Vec<String>,
    /// Whether more follow.
    pub continuation: Continuation,
}

impl fmt::Debug for PushPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushPart")
            .field("options", &self.options.len())
            .field("continuation", &self.continuation)
            .finish()
    }
}

impl PushPart {
    pub(super) fn parse(content: &str) -> Self {
        let mut part = Self::default();
        for option in content.split(',').filter(|option| !option.trim().is_empty()) {
            match option.trim().strip_prefix(CONTINUATION).map(str::trim) {
                Some("1") => part.continuation = Continuation::Last,
                Some("2") => part.continuation = Continuation::More,
                Some(_) => {}
                None => part.options.push(option.to_owned()),
            }
        }
        part
    }

    pub(super) fn to_text(&self) -> String {
        let mut options = self.options.join(",");
        let mark = match self.continuation {
            Continuation::Whole => return options,
            Continuation::Last => '1',
            Continuation::More => '2',
        };
        if !options.is_empty() {
            options.push(',');
        }
        options.push_str(CONTINUATION);
        options.push(mark);
        options
    }
}

/// The parts of a PUSH_REPLY with these options, in their order.
///
/// # Errors
/// [`MessageError::UnpushableCharacter`], [`MessageError::PushTooLong`]
pub fn push_reply(options: &[String]) -> Result<Vec<PushPart>, MessageError> {
    parts("PUSH_REPLY", options)
}

/// The parts of a PUSH_UPDATE, as [`push_reply`].
///
/// # Errors
/// As [`push_reply`].
pub fn push_update(options: &[PushUpdateOption]) -> Result<Vec<PushPart>, MessageError> {
    let options: Vec<String> = options.iter().map(PushUpdateOption::to_text).collect();
    parts("PUSH_UPDATE", &options)
}

fn parts(word: &str, options: &[String]) -> Result<Vec<PushPart>, MessageError> {
    // The word, the continuation and the NUL.
    let room = PUSH_MESSAGE_BYTES_MAX - word.len() - CONTINUATION_BYTES - 1;
    let mut parts = vec![PushPart::default()];
    let mut filled = 0;
    for option in options {
        if option.contains(',') || option.chars().any(char::is_control) {
            return Err(MessageError::UnpushableCharacter(name_of(option).to_owned()));
        }
        if option.len() > PUSH_OPTION_BYTES_MAX {
            let (option, bytes) = (name_of(option).to_owned(), option.len());
            return Err(MessageError::PushTooLong { option, bytes });
        }
        let bytes = option.len() + 1;
        if filled + bytes > room {
            parts.push(PushPart::default());
            filled = 0;
        }
        if let Some(part) = parts.last_mut() {
            part.options.push(option.clone());
        }
        filled += bytes;
    }
    let last = parts.len() - 1;
    for (at, part) in parts.iter_mut().enumerate() {
        part.continuation = match (last, at == last) {
            (0, _) => Continuation::Whole,
            (_, true) => Continuation::Last,
            (_, false) => Continuation::More,
        };
    }
    Ok(parts)
}

/// The name of an option, without what may be secret.
fn name_of(option: &str) -> &str {
    option.split(|char: char| char.is_whitespace() || char == ',').next().unwrap_or_default()
}

/// Puts the parts of a push together.
#[derive(Debug, Default)]
pub struct PushCollector {
    held: PushPart,
    bytes: usize,
}

impl PushCollector {
    /// Takes the next part; returns all options when it was the last.
    ///
    /// # Errors
    /// [`MessageError::TooMuchPushed`]; what was held is gone.
    pub fn handle_part(&mut self, part: PushPart) -> Result<Option<Vec<String>>, MessageError> {
        self.bytes += part.options.iter().map(String::len).sum::<usize>();
        if self.bytes > PUSH_BYTES_MAX
            || self.held.options.len() + part.options.len() > PUSH_OPTIONS_MAX
        {
            *self = Self::default();
            return Err(MessageError::TooMuchPushed);
        }
        self.held.options.extend(part.options);
        if part.continuation == Continuation::More {
            return Ok(None);
        }
        Ok(Some(std::mem::take(self).held.options))
    }
}

/// One option of a PUSH_UPDATE. It may hold a token, so its name alone is shown.
#[derive(Clone, PartialEq, Eq)]
pub struct PushUpdateOption {
    /// The option goes away rather than comes (`-`).
    pub removes: bool,
    /// A client that cannot do it ignores it rather than connects again (`?`).
    pub optional: bool,
    /// The option; only its name, where it goes away.
    pub option: String,
}

impl fmt::Debug for PushUpdateOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushUpdateOption")
            .field("removes", &self.removes)
            .field("optional", &self.optional)
            .field("option", &name_of(&self.option))
            .finish()
    }
}

impl PushUpdateOption {
    /// Reads an option with its marks.
    pub fn parse(text: &str) -> Self {
        let mut update = Self { removes: false, optional: false, option: String::new() };
        let mut rest = text.trim_start();
        loop {
            let (mark, behind) = match rest.as_bytes().first() {
                Some(b'-') => (&mut update.removes, &rest[1..]),
                Some(b'?') => (&mut update.optional, &rest[1..]),
                _ => break,
            };
            if std::mem::replace(mark, true) {
                break;
            }
            rest = behind;
        }
        rest.clone_into(&mut update.option);
        update
    }

    fn to_text(&self) -> String {
        let marks = match (self.removes, self.optional) {
            (false, false) => "",
            (true, false) => "-",
            (false, true) => "?",
            (true, true) => "-?",
        };
        format!("{marks}{}", self.option)
    }
}
