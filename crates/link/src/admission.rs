//! Admission: on the first stream both ends prove that they know the same password or token. The proof is bound
//! to this very TLS connection and both identities (`docs/design/keys.md`). Before that, neither end reveals
//! anything, not even a name.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{Connection, RecvStream, SendStream};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout_at};
use weft_crypto::{CpaceContext, CpaceInitiator, CpaceResponder, PeerId, SessionKey};
use zeroize::Zeroizing;

use crate::error::{
    CloseCode, Failure, REASON_BAD_TOKEN, REASON_WRONG_PASSWORD, range_text, version_mismatch,
};
use crate::gate::Pass;
use crate::limits::FAILURE_DELAY_MAX_S;
use crate::link::Admitted;
use crate::rival;
use crate::secret::Secret;
use crate::shared::Shared;
use crate::status::Direction;
use crate::throttle::Booking;
use crate::tls;
use crate::token::{Token, TokenId};
use crate::wire::{
    ADMISSION_MAX_BYTES, Method, PREAMBLE_LEN, Ready, Step, UNPROVEN_MAX_BYTES, common_version,
    preamble, read_exact, read_frame, versions_of, write_frame,
};

const LABEL_ADMISSION: &[u8] = b"EXPORTER-weft-admission-1";
const LABEL_SESSION: &[u8] = b"EXPORTER-weft-session-1";
const LABEL_SESSION_ID: &[u8] = b"EXPORTER-weft-session-id-1";

/// Closes a connection after a failure found here, so that the peer learns the reason.
pub(crate) fn tell(shared: &Shared, conn: &Connection, failure: &Failure) {
    let code = failure.code().unwrap_or(CloseCode::Unknown);
    let text = match code {
        CloseCode::Version => range_text(&shared.versions),
        _ => crate::error::clean(failure.reason()),
    };
    conn.close(code.to_wire(), text.as_bytes());
}

/// Admission by the side that dialled. The connection is closed on failure.
pub(crate) async fn dialled(shared: &Arc<Shared>, conn: Connection) -> Result<Admitted, Failure> {
    let result = async {
        let mut talk = Talk::begin(shared, &conn, Direction::Outbound).await?;
        talk.initiate().await.and_then(|theirs| talk.finish(theirs))
    };
    result.await.inspect_err(|failure| tell(shared, &conn, failure))
}

/// Admission by the side that was dialled. The connection is closed on failure.
pub(crate) async fn accepted(
    shared: &Arc<Shared>,
    conn: Connection,
    pass: &Pass,
) -> Result<Admitted, Failure> {
    let result = async {
        let mut talk = Talk::begin(shared, &conn, Direction::Inbound).await?;
        talk.respond(pass).await.and_then(|theirs| talk.finish(theirs))
    };
    result.await.inspect_err(|failure| tell(shared, &conn, failure))
}

/// One run of admission.
struct Talk<'a> {
    shared: &'a Shared,
    conn: Connection,
    send: SendStream,
    recv: RecvStream,
    peer: PeerId,
    direction: Direction,
    initiator_key: [u8; 32],
    responder_key: [u8; 32],
    version: u16,
    /// `State::epoch` of the password in use.
    epoch: u64,
    /// The peer has proven the password or the token.
    proven: bool,
    deadline: Instant,
}

impl<'a> Talk<'a> {
    /// Checks the peer's key, opens the stream and agrees on a version.
    async fn begin(
        shared: &'a Shared,
        conn: &Connection,
        direction: Direction,
    ) -> Result<Self, Failure> {
        let (peer, theirs) =
            tls::peer_of(conn).ok_or_else(|| Failure::protocol("the peer showed no key"))?;
        if peer == shared.me {
            return Err(rival::own_key(shared, conn, direction).await);
        }
        let ours = shared.identity.public_key();
        let deadline = Instant::now() + shared.timing.admission_timeout;
        let open = async {
            match direction {
                Direction::Outbound => conn.open_bi().await,
                Direction::Inbound => conn.accept_bi().await,
            }
        };
        let (send, recv) = within(shared, deadline, open)
            .await?
            .map_err(|error| Failure::of_stranger(&error, &shared.versions))?;
        let (initiator_key, responder_key) = match direction {
            Direction::Outbound => (ours, theirs),
            Direction::Inbound => (theirs, ours),
        };
        let conn = conn.clone();
        let mut talk = Self {
            shared,
            conn,
            send,
            recv,
            peer,
            direction,
            initiator_key,
            responder_key,
            version: 0,
            epoch: 0,
            proven: false,
            deadline,
        };
        talk.agree_on_version().await?;
        Ok(talk)
    }

    async fn agree_on_version(&mut self) -> Result<(), Failure> {
        let ours = &self.shared.versions;
        if self.direction == Direction::Outbound {
            self.write(&preamble(ours)).await?;
        }
        let mut bytes = [0; PREAMBLE_LEN];
        let read = read_exact(&mut self.recv, &mut bytes, true);
        within(self.shared, self.deadline, read)
            .await?
            .map_err(|error| error.into_failure(|end| Failure::of_stranger(end, ours)))?;
        let theirs = versions_of(&bytes)
            .ok_or_else(|| Failure::protocol("the peer does not speak Weft's link protocol"))?;
        self.version = common_version(ours, &theirs)
            .ok_or_else(|| Failure::refused(CloseCode::Version, version_mismatch(&theirs, ours)))?;
        if self.direction == Direction::Inbound {
            self.write(&preamble(ours)).await?;
        }
        Ok(())
    }

    async fn initiate(&mut self) -> Result<Ready, Failure> {
        let (method, password) = self.credential()?;
        let context = self.cpace_context(method)?;
        let (cpace, share) = CpaceInitiator::start(&password, &context, random());
        self.put(&Step::Start { method, share }).await?;

        // The answer may be delayed by earlier failures from other hosts at our address.
        self.deadline += Duration::from_secs(FAILURE_DELAY_MAX_S);
        let Step::Share(share) = self.get(UNPROVEN_MAX_BYTES).await? else {
            return Err(unexpected());
        };
        self.deadline = Instant::now() + self.shared.timing.admission_timeout;
        let proof = cpace.finish(&share).map_err(|_| unexpected())?;
        self.put(&Step::Proof(proof.tag())).await?;

        // From here on the peer has had its one guess: if it breaks off, the next attempt comes later.
        let answer = self.get(UNPROVEN_MAX_BYTES).await.map_err(|failure| match failure {
            Failure::Unreachable { reason } => Failure::protocol(&reason),
            other => other,
        })?;
        let Step::Accept(tag) = answer else { return Err(unexpected()) };
        proof.verify(&tag).map_err(|_| wrong(method))?;
        self.proven = true;

        let Step::Ready(theirs) = self.get(ADMISSION_MAX_BYTES).await? else {
            return Err(unexpected());
        };
        if let Method::Token(_) = method {
            let secret = theirs.secret.as_ref();
            let secret = secret.ok_or_else(|| Failure::protocol("the peer sent no secret"))?;
            self.shared.learn_secret(secret);
        }
        let ready = self.ready(None)?;
        self.put(&ready).await?;
        if let Method::Token(_) = method {
            self.put(&Step::Joined).await?;
        }
        Ok(theirs)
    }

    async fn respond(&mut self, pass: &Pass) -> Result<Ready, Failure> {
        let Step::Start { method, share: ya } = self.get(UNPROVEN_MAX_BYTES).await? else {
            return Err(unexpected());
        };
        pass.tries();
        let attempt = self.wait_for_turn().await?;
        let (secret, password) = self.password_for(method)?;
        let context = self.cpace_context(method)?;
        let (proof, yb) = CpaceResponder::respond(&password, &context, &ya, random())
            .map_err(|_| unexpected())?;
        self.put(&Step::Share(yb)).await?;
        let Step::Proof(tag) = self.get(UNPROVEN_MAX_BYTES).await? else {
            return Err(unexpected());
        };
        let (_, tag) = proof.verify(&tag).map_err(|_| wrong(method))?;
        self.shared.lock().throttle.take_back(&attempt);
        pass.is_proven();
        self.proven = true;

        let to_joiner = match method {
            Method::Token(id) => {
                self.claim(id)?;
                Some(secret)
            }
            Method::Password => None,
        };
        self.put(&Step::Accept(tag)).await?;
        let ready = self.ready(to_joiner)?;
        self.put(&ready).await?;
        let Step::Ready(theirs) = self.get(ADMISSION_MAX_BYTES).await? else {
            return Err(unexpected());
        };
        if let Method::Token(id) = method {
            let Step::Joined = self.get(UNPROVEN_MAX_BYTES).await? else {
                return Err(unexpected());
            };
            self.shared.lock().tokens.consume(id);
            tracing::info!(peer = %self.peer, nickname = theirs.nickname, "host joined by token");
        }
        Ok(theirs)
    }

    /// Delays the answer to a source with many failures. A known peer that has shown its key answers only for
    /// its own failures.
    async fn wait_for_turn(&mut self) -> Result<Booking, Failure> {
        let (address, now) = (self.conn.remote_address().ip(), Instant::now());
        let (booking, turns) = {
            let mut state = self.shared.lock();
            let known = state.knows(self.peer).then_some(self.peer);
            let booking = state.throttle.attempt(known, address, now).ok_or_else(|| {
                Failure::refused(CloseCode::Busy, "too many failed attempts from this address")
            })?;
            if state.throttle.delay(&booking, now).is_zero() {
                return Ok(booking);
            }
            (booking, state.throttle.wait())
        };
        let result = self.wait(&booking, &turns).await;
        let mut state = self.shared.lock();
        state.throttle.waited();
        if let Err(failure) = result {
            // It has not had its guess.
            state.throttle.take_back(&booking);
            return Err(failure);
        }
        self.deadline += now.elapsed();
        Ok(booking)
    }

    async fn wait(&self, booking: &Booking, turns: &Notify) -> Result<(), Failure> {
        loop {
            let turn = turns.notified();
            let delay = self.shared.lock().throttle.delay(booking, Instant::now());
            if delay.is_zero() {
                return Ok(());
            }
            tokio::select! {
                () = sleep(delay) => {}
                () = turn => {}
                error = self.conn.closed() => {
                    return Err(self.ended(&error));
                }
            }
        }
    }

    /// The credential by which this host proves that it belongs to the network.
    fn credential(&mut self) -> Result<(Method, Zeroizing<Vec<u8>>), Failure> {
        let state = self.shared.lock();
        self.epoch = state.epoch;
        match (&state.secret, &state.join_token) {
            (Some(secret), _) => Ok((Method::Password, copy(secret.expose()))),
            (None, Some(token)) => Ok((Method::Token(token.id()), copy(token.secret()))),
            (None, None) => Err(Failure::refused(CloseCode::NotReady, NOT_READY)),
        }
    }

    /// The network's secret, and the password to check a host with this method against.
    fn password_for(&mut self, method: Method) -> Result<(Secret, Zeroizing<Vec<u8>>), Failure> {
        let mut state = self.shared.lock();
        self.epoch = state.epoch;
        let Some(secret) = state.secret.clone() else {
            return Err(Failure::refused(CloseCode::NotReady, NOT_READY));
        };
        let password = match method {
            Method::Password => copy(secret.expose()),
            Method::Token(id) => {
                let token: Option<Token> = state.tokens.find(id, self.peer, Instant::now());
                copy(token.ok_or_else(|| wrong(method))?.secret())
            }
        };
        Ok((secret, password))
    }

    /// Reserves the token for this peer, unless another was faster.
    fn claim(&self, id: TokenId) -> Result<(), Failure> {
        let claimed = self.shared.lock().tokens.claim(id, self.peer, Instant::now());
        if claimed { Ok(()) } else { Err(wrong(Method::Token(id))) }
    }

    fn cpace_context(&self, method: Method) -> Result<CpaceContext, Failure> {
        let (name, id) = match method {
            Method::Password => ("password", TokenId::default()),
            Method::Token(id) => ("token", id),
        };
        let mut sid = vec![0; 32];
        export(&self.conn, &mut sid, LABEL_ADMISSION, &id)?;
        Ok(CpaceContext {
            ci: format!("weft-link {} {name}", self.version).into_bytes(),
            sid,
            ada: self.initiator_key.to_vec(),
            adb: self.responder_key.to_vec(),
        })
    }

    fn ready(&self, secret: Option<Secret>) -> Result<Step, Failure> {
        let state = self.shared.lock();
        state.check_wanted(self.peer)?;
        Ok(Step::Ready(Ready {
            instance: self.shared.instance,
            succeeds: self.shared.succeeds,
            current: state.links.get(&self.peer).map(|link| link.session_id),
            nickname: self.shared.nickname.clone(),
            hello: state.hello.clone(),
            secret,
        }))
    }

    fn finish(self, theirs: Ready) -> Result<Admitted, Failure> {
        let hello = serde_json::from_slice(&theirs.hello)
            .map_err(|_| Failure::protocol("the peer's hello is not JSON"))?;
        let (low, high) = (self.shared.me.min(self.peer), self.shared.me.max(self.peer));
        let context = [low.as_bytes().as_slice(), high.as_bytes()].concat();
        let mut session = Zeroizing::new([0; 32]);
        export(&self.conn, session.as_mut_slice(), LABEL_SESSION, &context)?;
        let mut id = [0; 8];
        export(&self.conn, &mut id, LABEL_SESSION_ID, &context)?;
        Ok(Admitted {
            conn: self.conn,
            send: self.send,
            recv: self.recv,
            peer: self.peer,
            direction: self.direction,
            session: SessionKey::from_bytes(*session),
            // Zero means no session.
            session_id: u64::from_be_bytes(id).max(1),
            theirs,
            hello,
            epoch: self.epoch,
        })
    }

    async fn put(&mut self, step: &Step) -> Result<(), Failure> {
        let bytes = step.encode();
        let write = write_frame(&mut self.send, &bytes);
        within(self.shared, self.deadline, write).await?.map_err(|error| self.write_failed(error))
    }

    async fn get(&mut self, max: usize) -> Result<Step, Failure> {
        let read = read_frame(&mut self.recv, max);
        let bytes = within(self.shared, self.deadline, read)
            .await?
            .map_err(|error| error.into_failure(|end| self.ended(end)))?;
        Step::decode(&Zeroizing::new(bytes)).ok_or_else(unexpected)
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let write = self.send.write_all(bytes);
        within(self.shared, self.deadline, write).await?.map_err(|error| self.write_failed(error))
    }

    fn write_failed(&self, error: quinn::WriteError) -> Failure {
        match error {
            quinn::WriteError::ConnectionLost(error) => self.ended(&error),
            _ => Failure::protocol("the peer stopped the stream"),
        }
    }

    /// The meaning of the connection's end, which depends on what the peer has proven.
    fn ended(&self, error: &quinn::ConnectionError) -> Failure {
        let ours = &self.shared.versions;
        if self.proven { Failure::of_peer(error, ours) } else { Failure::of_stranger(error, ours) }
    }
}

const NOT_READY: &str = "this host has not joined a network yet";

async fn within<T>(
    shared: &Shared,
    deadline: Instant,
    work: impl Future<Output = T>,
) -> Result<T, Failure> {
    timeout_at(deadline.into(), work).await.map_err(|_| {
        let limit = shared.timing.admission_timeout;
        Failure::refused(CloseCode::Timeout, format!("admission took longer than {limit:?}"))
    })
}

fn export(conn: &Connection, out: &mut [u8], label: &[u8], context: &[u8]) -> Result<(), Failure> {
    conn.export_keying_material(out, label, context)
        .map_err(|_| Failure::protocol("no keys could be exported from TLS"))
}

fn wrong(method: Method) -> Failure {
    match method {
        Method::Password => Failure::refused(CloseCode::WrongPassword, REASON_WRONG_PASSWORD),
        Method::Token(_) => Failure::refused(CloseCode::BadToken, REASON_BAD_TOKEN),
    }
}

fn unexpected() -> Failure {
    Failure::protocol("the peer broke the rules of admission")
}

fn copy(secret: &[u8]) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(secret.to_vec())
}

fn random() -> [u8; 64] {
    let mut bytes = [0; 64];
    rand::fill(&mut bytes);
    bytes
}
