//! The logins that wait for a browser: who waits, under which marks, and what a browser has to show.

use std::collections::HashMap;
use std::net::IpAddr;

use data_encoding::BASE64URL_NOPAD;
use tokio::sync::oneshot;
use zeroize::Zeroizing;

/// Logins that wait at once.
const PENDING_MAX: usize = 1_024;
/// Those of one certificate.
const PENDING_OF_NAME_MAX: usize = 8;
/// Bytes of a login's number in its URL.
const TICKET_BYTES: usize = 16;
/// Bytes of `state`, `nonce`, the verifier of PKCE (RFC 7636 has 32) and a browser's cookie.
const MARK_BYTES: usize = 32;

/// Who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super::super) struct Who {
    /// The name of the certificate.
    pub(in super::super::super) certificate: String,
    /// The address of the client.
    pub(in super::super::super) from: IpAddr,
}

/// What came of a login, for the gateway.
#[derive(Debug)]
pub(in super::super::super) struct LoggedIn {
    /// The user, or a text for a client that is refused.
    pub(in super::super::super) user: Result<String, String>,
    /// Tells the browser whether the client is let in; else why not.
    pub(in super::super::super) told: oneshot::Sender<Result<(), String>>,
}

/// No more logins may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super::super) struct Full;

/// What a browser comes back with is of no use: it is too late, comes twice, or was made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MarkFault {
    /// There is no such login any more.
    #[error("this login is over")]
    Over,
    /// It began in another browser.
    #[error("this login began in another browser")]
    OtherBrowser,
}

/// What a browser takes to the provider.
pub(super) struct Marks {
    pub(super) state: String,
    pub(super) nonce: String,
    pub(super) verifier: Zeroizing<String>,
}

/// A login that has come back.
pub(super) struct Back {
    pub(super) who: Who,
    pub(super) nonce: String,
    pub(super) verifier: Zeroizing<String>,
    pub(super) sender: oneshot::Sender<LoggedIn>,
}

struct Entry {
    who: Who,
    sender: oneshot::Sender<LoggedIn>,
    /// The browser that has opened the page last.
    cookie: Option<String>,
    /// What that browser was sent away with.
    marks: Option<Marks>,
}

/// The logins that wait.
#[derive(Default)]
pub(super) struct Pending {
    /// By ticket.
    entries: HashMap<String, Entry>,
    /// The ticket of each state.
    states: HashMap<String, String>,
}

impl Pending {
    /// A login that waits from now on; returns its ticket.
    ///
    /// # Errors
    /// Too many wait.
    pub(super) fn add(
        &mut self,
        who: Who,
        sender: oneshot::Sender<LoggedIn>,
    ) -> Result<String, Full> {
        let of_name = self.entries.values().filter(|it| it.who.certificate == who.certificate);
        if self.entries.len() >= PENDING_MAX || of_name.count() >= PENDING_OF_NAME_MAX {
            return Err(Full);
        }
        let ticket = random::<TICKET_BYTES>();
        self.entries.insert(ticket.clone(), Entry { who, sender, cookie: None, marks: None });
        Ok(ticket)
    }

    /// A browser has opened the page of a login; returns its cookie. The last one that does goes on.
    pub(super) fn open(&mut self, ticket: &str) -> Option<(String, Who)> {
        let entry = self.entries.get_mut(ticket)?;
        let cookie = random::<MARK_BYTES>();
        entry.cookie = Some(cookie.clone());
        if let Some(marks) = entry.marks.take() {
            self.states.remove(&marks.state);
        }
        Some((cookie, entry.who.clone()))
    }

    /// A browser goes to the provider; returns state, nonce and the verifier.
    ///
    /// # Errors
    /// [`MarkFault`]
    pub(super) fn leave(&mut self, ticket: &str, cookie: &str) -> Result<Marks, MarkFault> {
        let entry = self.entries.get_mut(ticket).ok_or(MarkFault::Over)?;
        if entry.cookie.as_deref() != Some(cookie) {
            return Err(MarkFault::OtherBrowser);
        }
        let [state, nonce, verifier] = std::array::from_fn(|_| random::<MARK_BYTES>());
        let marks = || Marks {
            state: state.clone(),
            nonce: nonce.clone(),
            verifier: Zeroizing::new(verifier.clone()),
        };
        if let Some(before) = entry.marks.replace(marks()) {
            self.states.remove(&before.state);
        }
        self.states.insert(state.clone(), ticket.to_owned());
        Ok(marks())
    }

    /// A browser has come back from the provider. Each state is good once.
    ///
    /// # Errors
    /// [`MarkFault`]
    pub(super) fn back(&mut self, state: &str, cookie: &str) -> Result<Back, MarkFault> {
        let ticket = self.states.get(state).ok_or(MarkFault::Over)?;
        let entry = self.entries.get(ticket).ok_or(MarkFault::Over)?;
        if entry.cookie.as_deref() != Some(cookie) {
            return Err(MarkFault::OtherBrowser);
        }
        let ticket = self.states.remove(state).ok_or(MarkFault::Over)?;
        let Entry { who, sender, marks, .. } =
            self.entries.remove(&ticket).ok_or(MarkFault::Over)?;
        let Marks { nonce, verifier, .. } = marks.ok_or(MarkFault::Over)?;
        Ok(Back { who, nonce, verifier, sender })
    }

    /// A login waits no more.
    pub(super) fn remove(&mut self, ticket: &str) {
        let entry = self.entries.remove(ticket);
        if let Some(marks) = entry.and_then(|entry| entry.marks) {
            self.states.remove(&marks.state);
        }
    }

    /// How many wait.
    #[cfg(test)]
    pub(super) fn len(&self) -> (usize, usize) {
        (self.entries.len(), self.states.len())
    }
}

fn random<const N: usize>() -> String {
    BASE64URL_NOPAD.encode(&rand::random::<[u8; N]>())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn who(name: &str) -> Who {
        Who { certificate: name.into(), from: "192.0.2.7".parse().unwrap() }
    }

    fn add(pending: &mut Pending, name: &str) -> Result<String, Full> {
        pending.add(who(name), oneshot::channel().0)
    }

    #[test]
    fn a_login_comes_back_once_and_from_its_browser_alone() {
        let mut pending = Pending::default();
        let ticket = add(&mut pending, "anna").unwrap();
        assert_eq!(pending.leave(&ticket, "").map(drop), Err(MarkFault::OtherBrowser));
        let (cookie, shown) = pending.open(&ticket).unwrap();
        assert_eq!(shown, who("anna"));
        assert_eq!(pending.leave(&ticket, "other").map(drop), Err(MarkFault::OtherBrowser));
        let marks = pending.leave(&ticket, &cookie).unwrap();
        assert!(marks.state != marks.nonce && marks.nonce != *marks.verifier);
        assert_eq!(pending.back("made up", &cookie).map(drop), Err(MarkFault::Over));
        // The login is still good then.
        assert_eq!(pending.back(&marks.state, "other").map(drop), Err(MarkFault::OtherBrowser));
        let back = pending.back(&marks.state, &cookie).unwrap();
        assert_eq!((back.nonce, back.verifier), (marks.nonce, marks.verifier));
        assert_eq!(pending.back(&marks.state, &cookie).map(drop), Err(MarkFault::Over));
        assert_eq!(pending.leave(&ticket, &cookie).map(drop), Err(MarkFault::Over));
        assert_eq!(pending.len(), (0, 0));
    }

    #[test]
    fn the_last_browser_goes_on_and_nothing_is_left_of_a_login() {
        let mut pending = Pending::default();
        let ticket = add(&mut pending, "anna").unwrap();
        let (first, _) = pending.open(&ticket).unwrap();
        let old = pending.leave(&ticket, &first).unwrap();
        let (second, _) = pending.open(&ticket).unwrap();
        assert_eq!(pending.back(&old.state, &first).map(drop), Err(MarkFault::Over));
        assert_eq!(pending.leave(&ticket, &first).map(drop), Err(MarkFault::OtherBrowser));
        pending.leave(&ticket, &second).unwrap();
        let marks = pending.leave(&ticket, &second).unwrap();
        assert_eq!(pending.len(), (1, 1), "one state for each login");
        pending.remove(&ticket);
        assert_eq!(pending.back(&marks.state, &second).map(drop), Err(MarkFault::Over));
        assert!(pending.open(&ticket).is_none());
        assert_eq!(pending.len(), (0, 0));
    }

    #[test]
    fn only_so_many_wait() {
        let mut pending = Pending::default();
        let tickets: Vec<_> = (0..PENDING_OF_NAME_MAX).map(|_| add(&mut pending, "anna")).collect();
        assert_eq!(add(&mut pending, "anna"), Err(Full));
        pending.remove(tickets[0].as_ref().unwrap());
        assert!(add(&mut pending, "anna").is_ok());
        for number in pending.len().0..PENDING_MAX {
            add(&mut pending, &format!("c{number}")).unwrap();
        }
        assert_eq!(add(&mut pending, "berta"), Err(Full));
    }
}
