//! Drives one session: packets, the device's keys, what the server says.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use serde_json::{Value, json};
use tokio::time::timeout;
use weft_openvpn::device::{DeletionReason, Slot};
use weft_openvpn::messages::{
    Advance, AuthFailure, Message, PendingStep, PushCollector, PushOption, PushPart, Secret,
};
use weft_openvpn::session::{DataKeys, EndReason, Event, Session};

use super::holdings::Holdings;
use super::login::{ask, printable};
use super::plan::{self, Plan};
use super::signals::Wish;
use super::tunnel::News;
use super::wire::Wire;
use crate::dco::Engine;

/// How long the last words may take.
const FAREWELL_LIMIT: Duration = Duration::from_secs(1);
/// The longest wait for anything, which then looks again.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Most questions of the server that wait for the user.
const QUESTIONS_MAX: usize = 4;

/// What comes after a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The user wants no more.
    Ended,
    /// The same server again, after this pause.
    Again(Duration),
    /// There was a connection, and it is lost.
    Lost,
    /// Another address or server, not before this pause is over.
    Next(Advance, Duration),
}

type Answer = Pin<Box<dyn Future<Output = anyhow::Result<Secret>>>>;

/// A session with its socket.
pub(super) struct Link<'a> {
    holdings: &'a mut Holdings,
    session: Session,
    /// `None`: the device has it alone.
    wire: Option<Wire>,
    is_tcp: bool,
    /// When the server must have said something.
    answers_by: Instant,
    is_connected: bool,
    ends_on_silence: bool,
    /// The options as they stand.
    pushed: Vec<String>,
    updates: PushCollector,
    questions: VecDeque<(String, bool)>,
    /// The user's answer to a question.
    answer: Option<Answer>,
    cipher: &'static str,
}

enum Input {
    Packet(std::io::Result<Vec<u8>>),
    News(anyhow::Result<News>),
    Wish(Wish),
    Answer(anyhow::Result<Secret>),
    Due,
}

impl<'a> Link<'a> {
    pub(super) fn new(
        holdings: &'a mut Holdings,
        session: Session,
        wire: Wire,
        is_tcp: bool,
        first_word: Duration,
    ) -> Self {
        Self {
            holdings,
            session,
            wire: Some(wire),
            is_tcp,
            answers_by: Instant::now() + first_word,
            is_connected: false,
            ends_on_silence: false,
            pushed: Vec::new(),
            updates: PushCollector::default(),
            questions: VecDeque::new(),
            answer: None,
            cipher: "",
        }
    }

    /// Whether there was a connection.
    pub(super) const fn was_connected(&self) -> bool {
        self.is_connected
    }

    /// Runs until the session is over.
    ///
    /// # Errors
    /// Why nothing else is to be tried.
    pub(super) async fn run(&mut self) -> anyhow::Result<Outcome> {
        loop {
            if let Some(outcome) = self.settle().await? {
                return Ok(outcome);
            }
            let is_silent = self.session.remote().is_none();
            if is_silent && self.answers_by <= Instant::now() {
                let address = self.session.address();
                self.holdings.report.warn(&format!("no answer from {address}"));
                return Ok(Outcome::Next(Advance::Address, Duration::ZERO));
            }
            let input = self.input().await;
            let now = Instant::now();
            match input {
                // What is wrong with a packet is its sender's business; it comes again.
                Input::Packet(Ok(packet)) => {
                    let _ = self.session.handle_datagram(now, &packet);
                }
                Input::Packet(Err(error)) => return Ok(self.lost(&error.to_string())),
                Input::News(news) => {
                    if let Some(outcome) = self.handle_news(news?)? {
                        return Ok(outcome);
                    }
                }
                Input::Wish(wish) => return Ok(self.leave(wish).await),
                Input::Answer(answer) => {
                    self.answer = None;
                    let answer = Message::ChallengeResponse(answer?);
                    self.session.send(now, &answer)?;
                }
                Input::Due => self.session.handle_timeout(now),
            }
        }
    }

    async fn input(&mut self) -> Input {
        let now = Instant::now();
        let due = self.session.poll_timeout(now).unwrap_or(now + WAIT_MAX);
        let silent = self.session.remote().is_none().then_some(self.answers_by);
        let due = due.min(silent.unwrap_or(due)).min(now + WAIT_MAX);
        if let (None, Some((text, echo))) = (&self.answer, self.questions.front().cloned()) {
            self.questions.pop_front();
            self.answer = Some(Box::pin(async move { ask(&text, echo).await }));
        }
        let (wire, answer) = (&mut self.wire, &mut self.answer);
        let packet = async {
            match wire {
                Some(wire) => wire.receive().await,
                None => std::future::pending().await,
            }
        };
        let answer = async {
            match answer {
                Some(answer) => answer.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            wish = self.holdings.signals.next() => Input::Wish(wish),
            packet = packet => Input::Packet(packet),
            news = self.holdings.tunnel.next() => Input::News(news),
            answer = answer => Input::Answer(answer),
            () = tokio::time::sleep_until(due.into()) => Input::Due,
        }
    }

    /// Does what the session wants, until it wants nothing.
    async fn settle(&mut self) -> anyhow::Result<Option<Outcome>> {
        loop {
            self.transmit().await;
            let Some(event) = self.session.poll_event() else { return Ok(None) };
            match event {
                Event::InstallKey(..) | Event::SwapKeys | Event::RemoveSecondaryKey => {
                    // The device may have lost its peer a moment ago.
                    if let Err(error) = self.change_keys(event).await {
                        return Ok(Some(self.lost(&format!("{error:#}"))));
                    }
                }
                Event::Pushed(options) => {
                    self.take_tokens(&options);
                    self.pushed = options;
                }
                Event::Connected => self.connected().await?,
                Event::Message(message) => {
                    if let Some(outcome) = self.handle_message(message).await? {
                        return Ok(Some(outcome));
                    }
                }
                Event::Ended(reason) => {
                    self.transmit().await;
                    return self.ended(reason).await.map(Some);
                }
                Event::Authenticate(_) => {}
            }
        }
    }

    /// Sends what the session has to send. A packet that is not taken comes again by itself.
    async fn transmit(&mut self) {
        while let Some(transmit) = self.session.poll_transmit(Instant::now()) {
            let sent = match &mut self.wire {
                Some(wire) => {
                    wire.send(transmit.address, &transmit.bytes).await.map_err(Into::into)
                }
                None => self.holdings.tunnel.send(&transmit.bytes),
            };
            if let Err(error) = sent {
                tracing::debug!(%error, "a control packet was not sent");
            }
        }
    }

    async fn change_keys(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::InstallKey(slot, keys) => self.install(slot, &keys).await,
            Event::SwapKeys => self.holdings.tunnel.swap_keys().await,
            Event::RemoveSecondaryKey => self.holdings.tunnel.remove_secondary().await,
            _ => Ok(()),
        }
    }

    async fn install(&mut self, slot: Slot, keys: &DataKeys) -> anyhow::Result<()> {
        if !self.holdings.tunnel.has_peer() {
            self.hand_over(keys.peer.get()).await?;
        }
        self.holdings.tunnel.install(slot, keys).await?;
        self.cipher = keys.cipher.name();
        if self.is_connected {
            let number = keys.key_id.get();
            let line = format!("key {number} is agreed on");
            self.holdings.report.tell("renewed", &line, json!({ "key-id": number }));
        }
        Ok(())
    }

    /// Gives the socket to the device.
    async fn hand_over(&mut self, id: u32) -> anyhow::Result<()> {
        let Some(wire) = &mut self.wire else { bail!("no socket for the device") };
        let tunnel = &mut self.holdings.tunnel;
        tunnel.new_peer(wire.as_fd(), wire.remote(), id).await?;
        if tunnel.carries_control() {
            self.wire = None;
        } else {
            wire.give()?;
        }
        Ok(())
    }

    async fn connected(&mut self) -> anyhow::Result<()> {
        let (plan, mtu) = self.apply().await?;
        self.is_connected = true;
        let (tunnel, report) = (&self.holdings.tunnel, self.holdings.report);
        for note in &plan.notes {
            report.warn(note);
        }
        let address = self.session.address();
        let own: Vec<String> = plan.addresses.iter().map(ToString::to_string).collect();
        let routes: Vec<Value> =
            plan.routes.iter().map(|route| json!(route.destination.to_string())).collect();
        let engine = match tunnel.engine {
            Engine::Kernel => "kernel",
            Engine::Userspace => "userspace",
        };
        let line = format!(
            "connected to {address}: {} on device {} ({engine} engine, {}, MTU {mtu}), {} routes",
            own.join(" and "),
            tunnel.name,
            self.cipher,
            routes.len(),
        );
        report.tell(
            "connected",
            &line,
            json!({
                "remote": address.to_string(),
                "device": tunnel.name,
                "engine": engine,
                "cipher": self.cipher,
                "addresses": own,
                "routes": routes,
                "mtu": mtu,
                "dns": plan.dns,
            }),
        );
        Ok(())
    }

    /// Brings about what the options mean.
    async fn apply(&mut self) -> anyhow::Result<(Plan, u32)> {
        let remote = self.session.address().ip().to_canonical();
        let plan = Plan::new(&self.holdings.profile, &self.pushed, remote)?;
        let mtu = self.holdings.host.apply(&plan, remote, self.is_tcp).await?;
        if let Err(error) = self.holdings.tunnel.set_keepalive(plan.keepalive).await {
            self.holdings.report.warn(&format!("signs of life are not set: {error:#}"));
        }
        self.ends_on_silence = plan.ends_on_silence;
        Ok((plan, mtu))
    }

    fn take_tokens(&mut self, options: &[String]) {
        let (mut user, mut token) = (None, None);
        for option in options {
            match PushOption::parse(option) {
                Ok(PushOption::AuthTokenUser(name)) => user = Some(name),
                Ok(PushOption::AuthToken(secret)) => token = Some(secret),
                _ => {}
            }
        }
        if let Some(token) = token {
            self.holdings.login.set_token(user, token);
        }
    }

    async fn handle_message(&mut self, message: Message) -> anyhow::Result<Option<Outcome>> {
        match message {
            Message::PushUpdate(part) => return self.update(part).await,
            Message::AuthPending { timeout_s } => {
                let line = "the server waits for a decision about the login";
                let fields = json!({ "timeout-s": timeout_s });
                self.holdings.report.tell("pending", line, fields);
            }
            Message::InfoPre(text) => self.step(&text),
            Message::Info(text) => {
                let line = format!("the server says: {text}");
                self.holdings.report.tell("info", &line, json!({ "text": printable(&text) }));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Something that the user has to do to be let in.
    fn step(&mut self, text: &str) {
        let report = self.holdings.report;
        match PendingStep::parse(text) {
            Some(PendingStep::OpenUrl(url) | PendingStep::WebAuth { url, .. }) => {
                let line = format!("open this page to log in: {url}");
                report.tell("open-url", &line, json!({ "url": printable(&url) }));
            }
            Some(PendingStep::Text { echo, has_response: true, text })
                if self.questions.len() < QUESTIONS_MAX =>
            {
                self.questions.push_back((format!("{} ", printable(&text)), echo));
            }
            Some(PendingStep::Text { text, .. }) => {
                let line = format!("the server says: {text}");
                report.tell("info", &line, json!({ "text": printable(&text) }));
            }
            None => tracing::debug!("a text of the server of an unknown kind"),
        }
    }

    async fn update(&mut self, part: PushPart) -> anyhow::Result<Option<Outcome>> {
        let Some(changes) = self.updates.handle_part(part)? else { return Ok(None) };
        let mut options = self.pushed.clone();
        if let Err(error) = plan::update(&mut options, &changes) {
            return Ok(Some(self.lost(&error.to_string())));
        }
        self.pushed = options;
        let (plan, mtu) = self.apply().await?;
        let own: Vec<String> = plan.addresses.iter().map(ToString::to_string).collect();
        let line = format!("the server changed {} options", changes.len());
        let fields = json!({ "addresses": own, "mtu": mtu, "routes": plan.routes.len() });
        self.holdings.report.tell("updated", &line, fields);
        Ok(None)
    }

    fn handle_news(&mut self, news: News) -> anyhow::Result<Option<Outcome>> {
        match news {
            News::Control(packet) => {
                let _ = self.session.handle_datagram(Instant::now(), &packet);
            }
            News::KeyUsedUp => self.renew(),
            News::Moved(address) => self.moved(address),
            News::Gone(DeletionReason::Userspace) => {}
            News::Gone(DeletionReason::Expired) if self.ends_on_silence => {
                bail!("the server has fallen silent, and ping-exit ends the client then")
            }
            News::Gone(DeletionReason::Expired) => {
                return Ok(Some(self.lost("the server has fallen silent")));
            }
            News::Gone(reason) => return Ok(Some(self.lost(reason.name()))),
        }
        Ok(None)
    }

    fn moved(&mut self, address: SocketAddr) {
        self.session.set_address(address);
        if let Some(wire) = &mut self.wire {
            wire.moved(address);
        }
        let line = format!("the server answers from {address} now");
        self.holdings.report.tell("moved", &line, json!({ "remote": address.to_string() }));
    }

    /// Agrees on a new key, unless that is happening already.
    fn renew(&mut self) {
        let _ = self.session.renegotiate(Instant::now());
    }

    fn lost(&self, why: &str) -> Outcome {
        let address = self.session.address();
        let line = format!("lost the connection to {address}: {why}");
        let fields = json!({ "remote": address.to_string(), "reason": printable(why) });
        self.holdings.report.tell("lost", &line, fields);
        match self.is_connected {
            true => Outcome::Lost,
            false => Outcome::Next(Advance::Address, Duration::ZERO),
        }
    }

    async fn ended(&mut self, reason: EndReason) -> anyhow::Result<Outcome> {
        match reason {
            EndReason::AuthFailed(failure) => self.refused(failure).await,
            EndReason::Halt(text) => bail!("the server asks to stop: {}", printable(&text)),
            EndReason::NotAgreed(_) | EndReason::Unasked(_) => Err(anyhow!(reason.to_string())),
            EndReason::Restart { next_remote: true, .. } => {
                self.lost(&reason.to_string());
                Ok(Outcome::Next(Advance::Remote, Duration::ZERO))
            }
            reason => Ok(self.lost(&reason.to_string())),
        }
    }

    /// The server does not let the user in.
    async fn refused(&mut self, failure: AuthFailure) -> anyhow::Result<Outcome> {
        let had_token = self.holdings.login.drop_token();
        let text = match failure {
            AuthFailure::Challenge(challenge) => {
                let signals = &mut self.holdings.signals;
                tokio::select! {
                    answered = self.holdings.login.answer(&challenge) => answered?,
                    () = signals.end() => return Ok(Outcome::Ended),
                }
                return Ok(Outcome::Again(Duration::ZERO));
            }
            AuthFailure::Temporary { backoff_s, advance, text } => {
                let pause = Duration::from_secs(backoff_s.unwrap_or(0).into());
                self.lost(&format!("the server cannot let anybody in now: {text}"));
                return Ok(Outcome::Next(advance.unwrap_or(Advance::Address), pause));
            }
            AuthFailure::Session(text) | AuthFailure::Text(text) => text,
            AuthFailure::Plain => String::new(),
        };
        if had_token {
            self.lost("the token is no longer good: the password is shown again");
            return Ok(Outcome::Again(Duration::ZERO));
        }
        if text.is_empty() {
            bail!(
                "the server refuses the login (AUTH_FAILED): correct user name and password, or the certificate"
            );
        }
        bail!("the server refuses the login (AUTH_FAILED): {}", printable(&text))
    }

    /// Says farewell, as far as the server understands it.
    async fn leave(&mut self, wish: Wish) -> Outcome {
        let is_said = self.session.close(Instant::now(), &Message::Exit);
        if is_said {
            let _ = timeout(FAREWELL_LIMIT, self.drain()).await;
        } else {
            self.transmit().await;
        }
        match wish {
            Wish::End => Outcome::Ended,
            Wish::Reconnect => {
                self.lost("a signal asks for it");
                Outcome::Again(Duration::ZERO)
            }
        }
    }

    /// Waits until the server has heard the last words.
    async fn drain(&mut self) {
        loop {
            self.transmit().await;
            let now = Instant::now();
            if self.session.is_drained(now) {
                return;
            }
            match self.input().await {
                Input::Packet(Ok(packet)) => {
                    let _ = self.session.handle_datagram(now, &packet);
                }
                Input::News(Ok(News::Control(packet))) => {
                    let _ = self.session.handle_datagram(now, &packet);
                }
                Input::Due => {}
                _ => return,
            }
        }
    }
}
