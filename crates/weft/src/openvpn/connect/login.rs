//! User name, password and answers to questions: from the profile, or from the terminal.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};

use anyhow::{Context, anyhow};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::oneshot;
use weft_openvpn::config::{ClientProfile, Login as Known, StaticChallenge};
use weft_openvpn::key_method::Credentials;
use weft_openvpn::messages::{Challenge, PasswordForm, Secret};
use zeroize::Zeroizing;

/// The longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 4_096;

/// What the user is known by, as far as it is known.
pub(super) struct Login {
    known: Option<Known>,
    challenge: Option<StaticChallenge>,
    /// The server's token, in the place of the password, until it is no longer good.
    token: Option<(Option<String>, Secret)>,
    /// The answer to the server's question, for the next attempt.
    answer: Option<(String, Secret)>,
}

impl Login {
    pub(super) fn new(profile: &ClientProfile) -> Self {
        let (known, challenge) = (profile.login.clone(), profile.challenge.clone());
        Self { known, challenge, token: None, answer: None }
    }

    /// What the next session shows. It may ask at the terminal, and waits.
    ///
    /// # Errors
    /// There is no terminal.
    pub(super) async fn credentials(&mut self) -> anyhow::Result<Credentials> {
        let Some(known) = &mut self.known else { return Ok(Credentials::Missing) };
        if let Some((user, answer)) = self.answer.take() {
            return Ok(given(user, &answer));
        }
        if known.user.is_none() {
            known.user = Some(ask("User name: ", true).await?.expose().to_owned());
        }
        let user = known.user.clone().unwrap_or_default();
        if let Some((token_user, token)) = &self.token {
            return Ok(given(token_user.clone().unwrap_or(user), token));
        }
        if known.password.is_none() {
            known.password = Some(ask("Password: ", false).await?);
        }
        let password = known.password.clone().unwrap_or_default();
        let Some(challenge) = &self.challenge else { return Ok(given(user, &password)) };
        let response = ask(&format!("{} ", printable(&challenge.text)), challenge.echo).await?;
        let secret = if challenge.is_concatenated {
            Secret::new(format!("{}{}", password.expose(), response.expose()))
        } else {
            PasswordForm::StaticChallenge { password, response }.to_secret()
        };
        Ok(given(user, &secret))
    }

    /// The server gave a token.
    pub(super) fn set_token(&mut self, user: Option<String>, token: Secret) {
        self.token = Some((user, token));
    }

    /// The server refused. True: a token was shown, and the password may do.
    pub(super) fn drop_token(&mut self) -> bool {
        self.token.take().is_some()
    }

    /// The server asks a question; the next attempt has the answer.
    ///
    /// # Errors
    /// There is no terminal.
    pub(super) async fn answer(&mut self, challenge: &Challenge) -> anyhow::Result<()> {
        let prompt = format!("{} ", printable(&challenge.text));
        let response = match challenge.has_response {
            true => ask(&prompt, challenge.echo).await?,
            false => Secret::default(),
        };
        self.known.get_or_insert_default();
        self.answer = Some((challenge.user.clone(), challenge.answer(response.expose())));
        Ok(())
    }
}

fn given(user: String, password: &Secret) -> Credentials {
    Credentials::Given { user, password: Zeroizing::new(password.expose().to_owned()) }
}

/// A text of the server's, for a terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

/// Asks at the terminal of this process, whatever standard input and output are. Dropping the future leaves the
/// terminal as it was.
///
/// # Errors
/// There is no terminal.
pub(crate) async fn ask(prompt: &str, echo: bool) -> anyhow::Result<Secret> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/tty");
    let mut terminal = opened.map_err(|_| {
        let what = prompt.trim_end_matches([' ', ':']);
        anyhow!(
            "no terminal to ask for \"{what}\": name a file by auth-user-pass FILE in the profile"
        )
    })?;
    terminal.write_all(prompt.as_bytes())?;
    let _hidden = if echo { None } else { Some(Hidden::new(terminal.try_clone()?)?) };
    let (tell, told) = oneshot::channel();
    // A thread that nobody waits for: a signal ends the process while it reads.
    std::thread::Builder::new().name("terminal".to_owned()).spawn(move || {
        let _ = tell.send(read_line(&terminal));
    })?;
    told.await.context("the terminal cannot be read")?
}

/// A terminal that does not show what is typed.
struct Hidden {
    terminal: File,
    shown: Termios,
}

impl Hidden {
    fn new(terminal: File) -> anyhow::Result<Self> {
        let shown = tcgetattr(&terminal).context("cannot read the terminal's settings")?;
        let mut hidden = shown.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&terminal, OptionalActions::Flush, &hidden)?;
        Ok(Self { terminal, shown })
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        let _ = tcsetattr(&self.terminal, OptionalActions::Flush, &self.shown);
        let _ = self.terminal.write_all(b"\n");
    }
}

fn read_line(terminal: &File) -> anyhow::Result<Secret> {
    let mut line = Zeroizing::new(String::new());
    let read = std::io::Read::take(terminal, ANSWER_BYTES_MAX as u64);
    BufReader::new(read).read_line(&mut line).context("cannot read from the terminal")?;
    Ok(Secret::new(line.trim_end_matches(['\r', '\n'])))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn login(user: &str, password: &str) -> Login {
        let known = Known { user: Some(user.to_owned()), password: Some(Secret::new(password)) };
        Login::new(&ClientProfile { login: Some(known), ..ClientProfile::default() })
    }

    async fn shown(login: &mut Login) -> (String, String) {
        match login.credentials().await.unwrap() {
            Credentials::Given { user, password } => (user, password.as_str().to_owned()),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_token_takes_the_place_of_the_password_until_it_is_refused() {
        let mut login = login("anna", "secret");
        let pair = |user: &str, password: &str| (user.to_owned(), password.to_owned());
        assert_eq!(shown(&mut login).await, pair("anna", "secret"));
        login.set_token(Some("anna2".to_owned()), Secret::new("token"));
        assert_eq!(shown(&mut login).await, pair("anna2", "token"));
        assert!(login.drop_token() && !login.drop_token());
        assert_eq!(shown(&mut login).await, pair("anna", "secret"));
    }

    #[tokio::test]
    async fn an_answer_is_shown_once() {
        let mut login = login("anna", "secret");
        let text = "go on".to_owned();
        let challenge = Challenge {
            echo: false,
            has_response: false,
            state: "S1".to_owned(),
            user: "anna".to_owned(),
            text,
        };
        login.answer(&challenge).await.unwrap();
        assert_eq!(shown(&mut login).await.1, "CRV1::S1::");
        assert_eq!(shown(&mut login).await.1, "secret");
    }
}
