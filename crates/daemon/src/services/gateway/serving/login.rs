//! Who a client is: its certificate, its password, and what is done when that is known.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::oneshot;
use weft_openvpn::data::PeerNumber;
use weft_openvpn::key_method::PeerInfo;
use weft_openvpn::messages::{AuthFailure, Message, PendingStep, Secret, push_reply};
use weft_openvpn::session::{Acceptance, AuthRequest, Session};

use super::Serving;
use crate::services::gateway::authority::{Holder, above_of};
use crate::services::gateway::client::{Asking, Client, Known, Stage, Todo};
use crate::services::gateway::journal::Weight;
use crate::services::gateway::login::{
    Ask, CODE_TEXT, CODE_WAIT_S, Ended, Identity, Judged, Logins, PageWay, Verdict, Waiting, Who,
};
use crate::services::gateway::sockets::Transport;

/// What a refused client shows to its user.
pub(super) const REVOKED: &str = "The certificate is revoked";
const FULL: &str = "The server has as many clients as it takes";
const OTHER_NAME: &str = "The certificate is another client's";
/// What a browser shows of a refusal without a text.
const REFUSED: &str = "The gateway refuses the client";

/// Whose sessions end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum Whom {
    /// Those of a client with a certificate of this name.
    Certificate(String),
    /// Those of a user.
    User(String),
    /// Those of the name by which a client is known.
    Name(String),
    /// Those of an address. `None`: over either protocol, or from any port.
    At { is_tcp: Option<bool>, address: IpAddr, port: Option<u16> },
    /// The one with this number.
    Number(u32),
}

impl Whom {
    /// Whether a session is one of these, whose client is known so.
    pub(super) fn is(&self, number: u32, client: &Client, known: &Known) -> bool {
        match self {
            Self::Certificate(name) => {
                known.certificate.as_ref().is_some_and(|holder| holder.name == *name)
            }
            Self::User(name) => known.login.user.as_ref() == Some(name),
            Self::Name(name) => known.login.name == *name,
            Self::At { is_tcp, address, port } => {
                client.address.ip().to_canonical() == address.to_canonical()
                    && port.is_none_or(|port| port == client.address.port())
                    && is_tcp.is_none_or(|is_tcp| is_tcp == (client.transport == Transport::Tcp))
            }
            Self::Number(wanted) => *wanted == number,
        }
    }
}

/// What is shown of a client: all that it says would be a kilobyte for each of ten thousand.
fn shown_of(info: &PeerInfo) -> PeerInfo {
    let mut shown = PeerInfo::default();
    for name in ["IV_VER", "IV_PLAT"] {
        info.get(name).into_iter().for_each(|value| shown.set(name, value));
    }
    shown
}

impl Serving {
    /// A client has shown who it is, at first or with a later key.
    pub(super) fn authenticate(&mut self, number: u32, request: AuthRequest) {
        if let Err(why) = self.judge(number, request) {
            let failure = AuthFailure::Text(why.into());
            self.handle_verdict(number, Verdict::Refuse("certificate_refused", failure));
        }
    }

    fn judge(&mut self, number: u32, request: AuthRequest) -> Result<(), &'static str> {
        let Some(client) = self.clients.get_mut(&number) else { return Ok(()) };
        let certificate = match request.certificates.split_first() {
            Some((certificate, chain)) => {
                let holder = self.gateway.holder(Some(certificate))?;
                Some(Holder { above: above_of(chain), ..holder })
            }
            None => None,
        };
        if certificate.as_ref().is_some_and(|holder| self.gateway.is_revoked(holder)) {
            return Err(REVOKED);
        }
        let known = match (&client.stage, request.is_renewal) {
            (Stage::Peer { known, .. }, true) => {
                let name = |of: &Option<Holder>| of.as_ref().map(|holder| holder.name.clone());
                if name(&known.certificate) != name(&certificate) {
                    return Err(OTHER_NAME);
                }
                Some(known.login.clone())
            }
            // A session that has ended here meanwhile.
            (_, true) => return Err(OTHER_NAME),
            (_, false) => None,
        };
        client.asking = Some(Box::new(Asking {
            certificate: certificate.clone(),
            cipher: request.cipher.name(),
            info: request.peer_info.clone(),
            identity: None,
            page: None,
            browser: None,
        }));
        let ask =
            Ask::new(certificate, request.credentials, client.address, known, &request.peer_info);
        let ask = ask.with_variables(self.gateway.variables());
        match self.gateway.logins.judge(&self.begun.login, ask) {
            Judged::Now(verdict) => self.handle_verdict(number, verdict),
            Judged::Later(checking) => {
                self.judged.spawn(async move { (number, checking.run().await) });
            }
            Judged::ByPage(way) => self.open_page(number, way),
        }
        Ok(())
    }

    /// Has a client's user log in by a web page.
    fn open_page(&mut self, number: u32, way: PageWay) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let (Some(asking), Some(oidc)) = (&mut client.asking, &self.begun.oidc) else { return };
        let certificate = asking.certificate.as_ref().map(|holder| holder.name.clone());
        let (certificate, from) =
            (certificate.unwrap_or_default(), client.address.ip().to_canonical());
        let Ok(waiting) = oidc.wait(Who { certificate, from }) else {
            return self.handle_verdict(number, Logins::page_busy());
        };
        let Waiting { url, wait, place, outcome } = waiting;
        let ticket = place.number();
        asking.page = Some(place);
        self.judged.spawn(async move { (number, Verdict::Page(ticket, outcome.ended().await)) });
        let step = match way {
            PageWay::WebAuth => PendingStep::WebAuth { flags: Vec::new(), url },
            PageWay::OpenUrl => PendingStep::OpenUrl(url),
        };
        self.ask(number, Todo::ShowPage(step, wait));
    }

    /// A browser has come back, or has not. The number may be another client's by now.
    fn handle_page(&mut self, number: u32, ticket: &str, ended: Ended) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Some(asking) = &mut client.asking else { return };
        if !asking.page.as_ref().is_some_and(|page| page.is(ticket)) {
            return;
        }
        asking.page = None;
        let verdict = match ended {
            Ended::Gone => Logins::page_gone(),
            Ended::Late => Logins::page_late(),
            Ended::Back(back) => {
                asking.browser = Some(back.told);
                let certificate = asking.certificate.as_ref().map(|holder| holder.name.as_str());
                self.gateway.logins.after_page(&self.begun.login, certificate, back.user)
            }
        };
        self.handle_verdict(number, verdict);
    }

    /// The answer to a question of [`Verdict::AskCode`].
    pub(super) fn handle_answer(&mut self, number: u32, code: Secret) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Some(asking) = &mut client.asking else { return };
        let (Some(identity), from) = (asking.identity.take(), client.address) else { return };
        let logins = Arc::clone(&self.gateway.logins);
        self.judged
            .spawn_blocking(move || (number, logins.check_code(identity, code.expose(), from)));
    }

    pub(super) fn handle_verdict(&mut self, number: u32, verdict: Verdict) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        match verdict {
            Verdict::LetIn(identity) if self.gateway.logins.is_current(&identity) => {
                self.let_on(number, identity);
            }
            Verdict::LetIn(_) => {
                let failure = AuthFailure::Text("The user was removed or changed".into());
                self.refuse(number, "login_refused", failure);
            }
            Verdict::AskCode(identity) => {
                if let Some(asking) = &mut client.asking {
                    asking.identity = Some(identity);
                    self.ask(number, Todo::AskCode);
                }
            }
            Verdict::Page(ticket, ended) => self.handle_page(number, &ticket, ended),
            Verdict::Refuse(counter, failure) => self.refuse(number, counter, failure),
        }
    }

    fn refuse(&mut self, number: u32, counter: &'static str, failure: AuthFailure) {
        self.count(counter);
        if let Some(client) = self.clients.get_mut(&number) {
            let browser = client.asking.as_mut().and_then(|asking| asking.browser.take());
            tell(browser, Err(shown_failure(&failure)));
            tracing::info!(why = ?failure, from = %client.address, "refused an OpenVPN client");
            let text = format!("{} was refused: {counter}", client.address);
            self.gateway.journal.line(Weight::Warning, &text);
        }
        self.ask(number, Todo::Deny(failure));
    }

    /// Plans when a client gets its next token, if its next key would come too late for that.
    pub(super) fn plan_token(&mut self, number: u32) {
        let key = self.begun.options.timing.renegotiate_after;
        let after = Logins::token_renewal(&self.begun.login);
        let after = after.filter(|after| key.is_none_or(|key| *after < key));
        let Some(client) = self.clients.get_mut(&number) else { return };
        let at = after.map(|after| Instant::now() + after);
        if let Some(before) = std::mem::replace(&mut client.token_at, at) {
            self.token_timers.remove(&(before, number));
        }
        self.token_timers.extend(at.map(|at| (at, number)));
    }

    /// Gives those a new token whose time has come.
    pub(super) fn handle_token_timers(&mut self) {
        let now = Instant::now();
        while let Some((at, number)) = self.token_timers.first().copied().filter(|it| it.0 <= now) {
            self.token_timers.remove(&(at, number));
            let Some(client) = self.clients.get_mut(&number) else { continue };
            client.token_at = None;
            let Stage::Peer { known, .. } = &client.stage else { continue };
            let token = self.gateway.logins.token_option(&self.begun.login, &known.login);
            if let Some(token) = token {
                self.ask(number, Todo::Token(token));
                self.plan_token(number);
            }
        }
    }

    /// Begins to let a client in, or goes on with it.
    fn let_on(&mut self, number: u32, identity: Identity) {
        if let Some(why) = self.gateway.refusal_of(&identity.name) {
            return self.refuse(number, "client_refused", AuthFailure::Text(why.into()));
        }
        self.forget_earlier(number, &identity.name);
        let (is_full, instance) =
            (self.is_full(&identity.name), self.free_instance(number, &identity.name));
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Some(asking) = client.asking.take() else { return };
        let Asking { certificate, cipher, info, browser, .. } = *asking;
        let now = SystemTime::now();
        if let Stage::Peer { known, .. } = &mut client.stage {
            known.certificate = certificate;
            known.last_handshake = now;
            let token = self.gateway.logins.token_option(&self.begun.login, &identity);
            known.login = identity;
            self.plan_token(number);
            return self.ask(number, Todo::Renew(token));
        }
        if !matches!(client.stage, Stage::Handshake) {
            return;
        }
        if is_full {
            tell(browser, Err(FULL.into()));
            return self.refuse(number, "clients_max", AuthFailure::Text(FULL.into()));
        }
        tell(browser, Ok(()));
        let name = identity.name.clone();
        self.names.entry(name.clone()).or_default().push(number);
        client.stage = Stage::Asked(Box::new(Known {
            login: identity,
            certificate,
            instance,
            addresses: Vec::new(),
            cipher,
            info: shown_of(&info),
            since: now,
            last_handshake: now,
        }));
        self.find_addresses(number, name, instance);
    }
}

/// Tells the user's browser, if one waits, what has become of a login.
fn tell(browser: Option<oneshot::Sender<Result<(), String>>>, outcome: Result<(), String>) {
    if let Some(browser) = browser {
        // One that was closed meanwhile.
        let _ = browser.send(outcome);
    }
}

/// What a refused client shows.
fn shown_failure(failure: &AuthFailure) -> String {
    match failure {
        AuthFailure::Text(text) => text.clone(),
        _ => REFUSED.to_owned(),
    }
}

/// Lets a client go on with its new key, which gets a new token behind it.
pub(super) fn renew(session: &mut Session, now: Instant, number: u32, token: Option<String>) {
    let Some(peer) = PeerNumber::new(number) else { return };
    // A session that is over by now needs no answer.
    if session.accept(now, Acceptance { peer, options: Vec::new() }).is_err() {
        return;
    }
    if let Some(token) = token {
        give_token(session, now, token);
    }
}

/// Gives a client a new token.
pub(super) fn give_token(session: &mut Session, now: Instant, token: String) {
    for part in push_reply(&[token]).unwrap_or_default() {
        let _ = session.send(now, &Message::PushReply(part));
    }
}

/// Asks a client's user for a code.
pub(super) fn ask_code(session: &mut Session, now: Instant) {
    let text = CODE_TEXT.to_owned();
    let step = PendingStep::Text { echo: true, has_response: true, text };
    // A session that is over by now needs no question.
    if session.pend(now, Duration::from_secs(CODE_WAIT_S)).is_ok() {
        let _ = session.send(now, &Message::InfoPre(step.to_text()));
    }
}

/// Has a client's user open a page.
pub(super) fn show_page(session: &mut Session, now: Instant, step: &PendingStep, wait: Duration) {
    // A session that is over by now needs no page.
    if session.pend(now, wait).is_ok() {
        let _ = session.send(now, &Message::InfoPre(step.to_text()));
    }
}
