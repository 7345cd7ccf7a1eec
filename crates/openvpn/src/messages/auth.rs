//! Refusals, challenges and the answers to them.

use std::fmt::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::Secret;

/// Why a server does not let a client in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthFailure {
    /// No reason.
    Plain,
    /// A reason that the client shows.
    Text(String),
    /// The client's token is no longer good: it asks for the password again.
    Session(String),
    /// The server cannot say now (of clients with `IV_PROTO` bit 8).
    Temporary {
        /// How long the client waits, in seconds.
        backoff_s: Option<u32>,
        /// Where it goes then.
        advance: Option<Advance>,
        /// The reason.
        text: String,
    },
    /// The server asks a question. The client connects again with the answer as its password.
    Challenge(Challenge),
}

/// Where a client goes after a temporary failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advance {
    /// It stays with the address.
    No,
    /// The next address of the same name.
    Address,
    /// The next server.
    Remote,
}

impl Advance {
    const fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Address => "addr",
            Self::Remote => "remote",
        }
    }
}

/// A question by which a login goes on (CRV1). Its mark stands for a password that was right, so it is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The answer may be shown while it is typed.
    pub echo: bool,
    /// There is an answer to type.
    pub has_response: bool,
    /// The server's mark, which comes back with the answer; without a colon.
    pub state: String,
    /// The name to log in with.
    pub user: String,
    /// The question.
    pub text: String,
}

impl fmt::Debug for Challenge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { echo, has_response, user, text, .. } = self;
        f.debug_struct("Challenge")
            .field("echo", echo)
            .field("has_response", has_response)
            .field("user", user)
            .field("text", text)
            .finish_non_exhaustive()
    }
}

impl AuthFailure {
    /// Reads the text behind the first comma. A form that is broken counts as a reason.
    pub(super) fn parse(content: Option<&str>) -> Self {
        let Some(content) = content else { return Self::Plain };
        if let Some(challenge) = content.strip_prefix("CRV1:").and_then(Challenge::parse) {
            return Self::Challenge(challenge);
        }
        let form = |word: &str, next: &[char]| {
            content.strip_prefix(word).filter(|rest| rest.is_empty() || rest.starts_with(next))
        };
        if let Some(rest) = form("TEMP", &['[', ':']) {
            return temporary(rest);
        }
        match form("SESSION", &[':']) {
            Some(rest) => Self::Session(rest.trim_start_matches(':').trim_start().to_owned()),
            None => Self::Text(content.to_owned()),
        }
    }

    pub(super) fn to_text(&self) -> String {
        match self {
            Self::Plain => String::new(),
            Self::Text(text) => text.clone(),
            Self::Session(text) if text.is_empty() => "SESSION".to_owned(),
            Self::Session(text) => format!("SESSION: {text}"),
            Self::Temporary { backoff_s, advance, text } => {
                let backoff = backoff_s.map(|seconds| format!("backoff {seconds}"));
                let advance = advance.map(|advance| format!("advance {}", advance.name()));
                let flags: Vec<String> = backoff.into_iter().chain(advance).collect();
                let mut out = String::from("TEMP");
                if !flags.is_empty() {
                    let _ = write!(out, "[{}]", flags.join(","));
                }
                if !text.is_empty() {
                    let _ = write!(out, ":{text}");
                }
                out
            }
            Self::Challenge(challenge) => challenge.to_text(),
        }
    }

    /// The same for a client that does not know [`Self::Temporary`].
    #[must_use]
    pub fn for_old_client(self) -> Self {
        match self {
            Self::Temporary { text, .. } if text.is_empty() => Self::Plain,
            Self::Temporary { text, .. } => Self::Text(text),
            other => other,
        }
    }
}

fn temporary(rest: &str) -> AuthFailure {
    let flagged = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (flags, text) = flagged.unwrap_or(("", rest));
    let (mut backoff_s, mut advance) = (None, None);
    for flag in flags.split(',') {
        match flag.trim().split_once(' ') {
            Some(("backoff", seconds)) => backoff_s = seconds.trim().parse().ok(),
            Some(("advance", to)) => {
                let all = [Advance::No, Advance::Address, Advance::Remote];
                advance = all.into_iter().find(|advance| advance.name() == to.trim());
            }
            _ => {}
        }
    }
    let text = text.strip_prefix(':').unwrap_or_default().to_owned();
    AuthFailure::Temporary { backoff_s, advance, text }
}

impl Challenge {
    fn parse(rest: &str) -> Option<Self> {
        let mut parts = rest.splitn(4, ':');
        let (flags, state, user, text) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let has = |letter: &str| flags.split(',').any(|flag| flag == letter);
        Some(Self {
            echo: has("E"),
            has_response: has("R"),
            state: state.to_owned(),
            user: String::from_utf8(STANDARD.decode(user).ok()?).ok()?,
            text: text.to_owned(),
        })
    }

    fn to_text(&self) -> String {
        let flags = flags(self.echo, self.has_response);
        let user = STANDARD.encode(&self.user);
        format!("CRV1:{flags}:{}:{user}:{}", self.state, self.text)
    }

    /// What a client puts in the place of its password to answer.
    pub fn answer(&self, response: &str) -> Secret {
        Secret::new(format!("CRV1::{}::{response}", self.state))
    }
}

const fn flags(echo: bool, has_response: bool) -> &'static str {
    match (has_response, echo) {
        (true, true) => "R,E",
        (true, false) => "R",
        (false, true) => "E",
        (false, false) => "",
    }
}

/// What a client put in the place of its password.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordForm {
    /// A password, or a token.
    Plain(Secret),
    /// The answer to [`AuthFailure::Challenge`].
    DynamicChallenge {
        /// The server's mark.
        state: String,
        /// The answer.
        response: Secret,
    },
    /// A password and the answer to the question in the client's profile (`static-challenge`).
    StaticChallenge {
        /// The password.
        password: Secret,
        /// The answer.
        response: Secret,
    },
}

impl fmt::Debug for PasswordForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain(..)",
            Self::DynamicChallenge { .. } => "DynamicChallenge { .. }",
            Self::StaticChallenge { .. } => "StaticChallenge { .. }",
        })
    }
}

impl PasswordForm {
    /// Tells the forms apart. A form that is broken counts as a password.
    pub fn parse(password: &str) -> Self {
        let dynamic = password.strip_prefix("CRV1::").and_then(|rest| rest.split_once("::"));
        if let Some((state, response)) = dynamic {
            let (state, response) = (state.to_owned(), Secret::new(response));
            return Self::DynamicChallenge { state, response };
        }
        let fixed = password.strip_prefix("SCRV1:").and_then(|rest| rest.split_once(':'));
        let decode = |text: &str| {
            let bytes = STANDARD.decode(text).ok()?;
            String::from_utf8(bytes).ok().map(Secret::new)
        };
        match fixed.and_then(|(first, second)| Some((decode(first)?, decode(second)?))) {
            Some((password, response)) => Self::StaticChallenge { password, response },
            None => Self::Plain(Secret::new(password)),
        }
    }

    /// What a client sends in the place of its password.
    pub fn to_secret(&self) -> Secret {
        match self {
            Self::Plain(password) => password.clone(),
            Self::DynamicChallenge { state, response } => {
                Secret::new(format!("CRV1::{state}::{}", response.expose()))
            }
            Self::StaticChallenge { password, response } => {
                let encode = |secret: &Secret| STANDARD.encode(secret.expose());
                Secret::new(format!("SCRV1:{}:{}", encode(password), encode(response)))
            }
        }
    }
}

/// What a user has to do before he is let in: the content of INFO_PRE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PendingStep {
    /// Open a page in a browser (of clients with `openurl`).
    OpenUrl(String),
    /// Open a page (of clients with `webauth`).
    WebAuth {
        /// `hidden`, `external`, `internal`, `proxy`.
        flags: Vec<String>,
        /// The page.
        url: String,
    },
    /// Answer a question; the answer comes as CR_RESPONSE (of clients with `crtext`).
    Text {
        /// The answer may be shown while it is typed.
        echo: bool,
        /// There is an answer to type.
        has_response: bool,
        /// The question.
        text: String,
    },
}

impl PendingStep {
    /// Reads the content of INFO_PRE; `None`: a text of another kind.
    pub fn parse(content: &str) -> Option<Self> {
        let (kind, rest) = content.split_once(':')?;
        match kind {
            "OPEN_URL" => Some(Self::OpenUrl(rest.to_owned())),
            "WEB_AUTH" => {
                let (flags, url) = rest.split_once(':')?;
                let flags = flags.split(',').filter(|flag| !flag.is_empty());
                Some(Self::WebAuth {
                    flags: flags.map(str::to_owned).collect(),
                    url: url.to_owned(),
                })
            }
            "CR_TEXT" => {
                let (flags, text) = rest.split_once(':')?;
                let has = |letter: &str| flags.split(',').any(|flag| flag == letter);
                let (echo, has_response) = (has("E"), has("R"));
                Some(Self::Text { echo, has_response, text: text.to_owned() })
            }
            _ => None,
        }
    }

    /// The content of INFO_PRE.
    pub fn to_text(&self) -> String {
        match self {
            Self::OpenUrl(url) => format!("OPEN_URL:{url}"),
            Self::WebAuth { flags, url } => format!("WEB_AUTH:{}:{url}", flags.join(",")),
            Self::Text { echo, has_response, text } => {
                format!("CR_TEXT:{}:{text}", flags(*echo, *has_response))
            }
        }
    }
}
