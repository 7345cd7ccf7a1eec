//! Who may log in: by a certificate, by a user name and a password, or by both, with one-time codes and tokens.
//!
//! Passwords are hashed on threads of their own, a few at a time, with a limit of how many wait. What costs nothing
//! (certificates, tokens, who has tried too often) is judged at once.

mod attempts;
mod oidc;
mod program;
mod settings;
mod shared;
mod totp;
mod users;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::sync::Semaphore;
use weft_api::{Auth, LoginSettings, VpnUser};
use weft_openvpn::auth_token::{EXPIRED_TEXT, TOKEN_SESSION_BYTES, TokenIdentity, TokenSigner};
use weft_openvpn::key_method::{Credentials, IvProto, PeerInfo};
use weft_openvpn::messages::{Advance, AuthFailure, Challenge, Message, PasswordForm, Secret};
use weft_openvpn::static_key::AuthTokenKey;
use zeroize::Zeroizing;

use self::attempts::{Attempt, Attempts};
use self::program::{Answer, Question};
use self::shared::Untold;
use self::users::User;
use super::authority::Holder;
use crate::upkeep::store::{Store, StoreError};

pub(crate) use self::oidc::provider_port;
pub(super) use self::oidc::{Ended, Oidc, Ticket, Waiting, Who};
pub(super) use self::settings::{TOKEN_LIFETIME_S_MAX, fault};
pub(super) use self::shared::TakenCode;
pub(super) use self::users::{Hashed, UserChange, UserError, Users, hash};

/// The file of the users.
const USERS_FILE: &str = "openvpn-users.json";
/// The file of the users of the authority's home, on another host.
const REPLICA_USERS_FILE: &str = "openvpn-replica-users.json";
/// The file of the codes that were taken just now.
const CODES_FILE: &str = "openvpn-codes.json";
/// The file of the key that signs tokens.
const KEY_FILE: &str = "openvpn-token-key.json";
/// The file of the key of the authority's home, on another host.
const REPLICA_KEY_FILE: &str = "openvpn-replica-token-key.json";
/// Logins that wait for a thread, or for a program.
const WAITING_MAX: usize = 256;
/// Passwords that are hashed at the same time, at most; each takes 19 MiB.
const HASHES_MAX: usize = 4;
/// Programs that run at the same time.
const PROGRAMS_MAX: usize = 8;
/// Users who have given their password, and whose code is awaited.
const CHALLENGES_MAX: usize = 1_024;
/// Of these, those of one user: a new one takes the place of the oldest.
const CHALLENGES_PER_USER_MAX: usize = 8;
/// How long a code is awaited, in seconds.
pub(super) const CODE_WAIT_S: u64 = 180;
/// A client comes again after so many seconds when too many wait.
const BUSY_S: u32 = 5;
/// How much another host's clock may be ahead of this one's, in seconds: its tokens are good here at once.
const AHEAD_MAX_S: u64 = 300;
/// Bytes of a token's session that say whose word it stands for.
const WORD_BYTES: usize = 4;

/// What a refused client shows to its user.
const NEEDED: &str = "User name and password are needed";
const WRONG: &str = "Wrong user name or password";
const WRONG_CODE: &str = "Wrong or used code";
const NO_CERTIFICATE: &str = "A certificate is needed";
const OTHER_USER: &str = "The certificate is another user's";
const NO_NAME: &str = "The user name is no name for a client";
const LIMITED: &str = "Too many failed logins; try again later";
const BUSY: &str = "Too many log in at once; try again in a moment";
const UNABLE: &str = "The gateway cannot check passwords now";
const NO_PAGE: &str = "Users log in by a web page here; this client does not say that it shows one (IV_SSO=webauth or openurl)";
const LATE: &str = "Nobody has logged in by the web page in time";
const GONE: &str = "The web page was closed before the login was judged; connect again";
/// What a user is asked for.
pub(super) const CODE_TEXT: &str = "One-time code:";

/// A client that asks to be let in.
pub(super) struct Ask {
    /// Its certificate, if it has shown one that is good.
    pub(super) certificate: Option<Holder>,
    pub(super) credentials: Credentials,
    pub(super) from: SocketAddr,
    /// At a later key of a session: who it is.
    pub(super) known: Option<Identity>,
    can: Abilities,
    /// What it says of itself.
    info: PeerInfo,
    /// The variables for a program.
    variables: Vec<(String, String)>,
}

/// What a client understands.
#[derive(Clone, Copy, Debug, Default)]
struct Abilities {
    /// A refusal for a time.
    waits: bool,
    /// A question in the middle of a login.
    answers: bool,
    /// A page to log in by.
    page: Option<PageWay>,
}

/// How a client is told of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageWay {
    /// `webauth`.
    WebAuth,
    /// `openurl`, of older clients.
    OpenUrl,
}

/// Who a client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// By which it is known.
    pub(super) name: String,
    /// The user who has logged in.
    pub(super) user: Option<String>,
    /// What its next token is made from.
    token: Option<TokenIdentity>,
    /// The user's, when the password was right; `None`: not one of the gateway's users.
    generation: Option<u32>,
}

/// What is to be done about a client.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It is let in.
    LetIn(Identity),
    /// It is not. The word is the counter's.
    Refuse(&'static str, AuthFailure),
    /// The password is right; the user is asked for a code, and [`Logins::check_code`] judges it.
    AskCode(Identity),
    /// What has come of the login with this ticket.
    Page(String, Ended),
}

/// What is known at once, and what takes time.
pub(super) enum Judged {
    Now(Verdict),
    Later(Box<Checking>),
    /// The user logs in by a web page, and [`Logins::after_page`] judges it.
    ByPage(PageWay),
}

/// A login whose password is being checked.
pub(super) struct Checking {
    logins: Arc<Logins>,
    settings: LoginSettings,
    ask: Ask,
    user: String,
    password: Zeroizing<String>,
    name: String,
    attempt: Attempt,
    _place: tokio::sync::OwnedSemaphorePermit,
}

/// All that logins need, for as long as the daemon runs.
pub(super) struct Logins {
    store: Store,
    runtime_dir: PathBuf,
    /// This host's name for people.
    host: String,
    /// The key that signs tokens, once it is needed.
    key: Mutex<Option<Arc<AuthTokenKey>>>,
    users: Mutex<Users>,
    /// The step of the last code taken of each user, while codes of that step are good.
    codes: Mutex<BTreeMap<String, u64>>,
    /// Codes taken here that other hosts are not told of yet.
    untold: Untold,
    attempts: Mutex<Attempts>,
    challenges: Mutex<BTreeMap<String, Awaited>>,
    waiting: Arc<Semaphore>,
    hashing: Semaphore,
    programs: Semaphore,
}

/// A user whose password was right, and whose code is awaited by a mark.
struct Awaited {
    identity: Identity,
    until: Instant,
}

/// How a client's user stands now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// As when the password was right.
    Current,
    /// With another password, or other codes.
    Changed,
    /// There is no such user any more.
    Removed,
}

impl Standing {
    /// What a client is told when its session ends by this; `None`: it goes on.
    pub(super) fn last_word(self) -> Option<Message> {
        match self {
            Self::Current => None,
            // It connects again, and shows its password.
            Self::Changed => Some(Message::Restart {
                preserve: false,
                next_remote: false,
                text: "the password or the codes were changed".into(),
            }),
            Self::Removed => Some(Message::Halt("user removed".into())),
        }
    }
}

impl Ask {
    pub(super) fn new(
        certificate: Option<Holder>,
        credentials: Credentials,
        from: SocketAddr,
        known: Option<Identity>,
        info: &PeerInfo,
    ) -> Self {
        let waits = info.proto().has(IvProto::AUTH_FAIL_TEMP);
        let page = match (info.has_sso("webauth"), info.has_sso("openurl")) {
            (true, _) => Some(PageWay::WebAuth),
            (false, true) => Some(PageWay::OpenUrl),
            (false, false) => None,
        };
        let can = Abilities { waits, answers: info.has_sso("crtext"), page };
        let info = info.clone();
        Self { certificate, credentials, from, known, can, info, variables: Vec::new() }
    }

    /// With these variables for a program that judges it.
    pub(super) fn with_variables(self, variables: Vec<(String, String)>) -> Self {
        Self { variables, ..self }
    }
}

impl Logins {
    /// Reads users and keys: on a replica those of the authority's home.
    ///
    /// # Errors
    /// A file of an earlier run cannot be read.
    pub(super) fn new(
        store: Store,
        runtime_dir: &Path,
        host: &str,
        is_replica: bool,
    ) -> Result<Self, StoreError> {
        program::tidy(runtime_dir);
        let users = shared::users(&store, is_replica)?;
        let key = if is_replica { shared::homes_key(&store)? } else { None };
        let codes = store.load(CODES_FILE)?.unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            store,
            runtime_dir: runtime_dir.to_owned(),
            host: host.to_owned(),
            key: Mutex::new(key.map(Arc::new)),
            users: Mutex::new(users),
            codes: Mutex::new(codes),
            untold: Untold::default(),
            attempts: Mutex::default(),
            challenges: Mutex::default(),
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            hashing: Semaphore::new(cores.min(HASHES_MAX)),
            programs: Semaphore::new(PROGRAMS_MAX),
        })
    }

    /// Prepares for passwords, if they are to be asked for. It may wait for the disk.
    pub(super) fn prepare(&self, settings: &LoginSettings) {
        if settings.auth.has_user() {
            self.key();
        }
    }

    /// Changes the users on a thread that hashes and waits for the disk. They are saved before they count.
    pub(super) async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Users) -> Result<T, UserError> + Send + 'static,
    ) -> Result<T, UserError> {
        let logins = Arc::clone(self);
        let changed = tokio::task::spawn_blocking(move || {
            let mut after = lock(&logins.users).clone();
            let told = change(&mut after)?;
            logins.store.save(USERS_FILE, &after)?;
            *lock(&logins.users) = after;
            Ok(told)
        });
        changed.await?
    }

    /// All users.
    pub(super) fn users(&self) -> Vec<VpnUser> {
        lock(&self.users).shown()
    }

    /// A user is gone.
    pub(super) fn forget(&self, user: &str) {
        lock(&self.attempts).forget(user);
    }

    /// What a user's authenticator takes.
    pub(super) fn otpauth(&self, user: &str, secret: &str) -> Zeroizing<String> {
        totp::otpauth(user, &self.host, secret)
    }

    /// Whether a user's logins need codes.
    pub(super) fn has_codes(&self, user: &str) -> bool {
        lock(&self.users).get(user).is_some_and(|user| user.totp.is_some())
    }

    /// Judges a client, as far as that takes no time.
    pub(super) fn judge(self: &Arc<Self>, settings: &LoginSettings, ask: Ask) -> Judged {
        match self.begin(settings, ask) {
            Ok(judged) => judged,
            Err(refused) => Judged::Now(refused),
        }
    }

    fn begin(self: &Arc<Self>, settings: &LoginSettings, ask: Ask) -> Result<Judged, Verdict> {
        let certificate = ask.certificate.as_ref().map(|holder| holder.name.as_str());
        if settings.auth == Auth::Certificate {
            let name = settings::name_of(settings, certificate, "").map_err(refused)?;
            let identity = Identity { name, user: None, token: None, generation: None };
            return Ok(Judged::Now(Verdict::LetIn(identity)));
        }
        let (user, password) = match (&ask.credentials, settings.auth) {
            (Credentials::Given { user, password }, Auth::Password | Auth::Both) => {
                (user, password)
            }
            (Credentials::Given { user, password }, _) if TokenSigner::is_token(password) => {
                (user, password)
            }
            (_, Auth::Oidc) => return by_page(&ask),
            _ => return Err(refused(NEEDED)),
        };
        // A directory takes a login without a name for one that needs no password.
        if user.is_empty() {
            return Err(refused(NEEDED));
        }
        let name = settings::name_of(settings, certificate, user).map_err(refused)?;
        if let Some(known) = &ask.known
            && (known.name != name || known.user.as_ref() != Some(user))
        {
            return Err(refused(OTHER_USER));
        }
        if TokenSigner::is_token(password) {
            let token = self.check_token(settings, user, password);
            let (token, generation) = token.ok_or_else(expired)?;
            let user = Some(user.clone());
            let token = Some(token);
            return Ok(Judged::Now(Verdict::LetIn(Identity { name, user, token, generation })));
        }
        let attempt = Attempt::new(user, ask.from.ip());
        let spent = lock(&self.attempts).spend(Instant::now(), &attempt);
        spent.map_err(|wait| later(ask.can, "login_limited", wait, LIMITED))?;
        let Ok(place) = Arc::clone(&self.waiting).try_acquire_owned() else {
            lock(&self.attempts).take_back(&attempt);
            let wait = Duration::from_secs(BUSY_S.into());
            return Err(later(ask.can, "login_busy", wait, BUSY));
        };
        let (user, password) = (user.clone(), password.clone());
        let (logins, settings) = (Arc::clone(self), settings.clone());
        let checking =
            Checking { logins, settings, ask, user, password, name, attempt, _place: place };
        Ok(Judged::Later(Box::new(checking)))
    }

    /// Judges a user who has logged in by a web page.
    pub(super) fn after_page(
        &self,
        settings: &LoginSettings,
        certificate: Option<&str>,
        user: Result<String, String>,
    ) -> Verdict {
        let user = match user {
            Ok(user) => user,
            Err(text) => return Verdict::Refuse("login_refused", AuthFailure::Text(text)),
        };
        match settings::name_of(settings, certificate, &user) {
            Ok(name) => {
                let token = Some(new_token(word_of(settings, None)));
                Verdict::LetIn(Identity { name, user: Some(user), token, generation: None })
            }
            Err(text) => refused(text),
        }
    }

    /// The verdict on a client whose user has not logged in by the web page.
    pub(super) fn page_late() -> Verdict {
        Verdict::Refuse("login_late", AuthFailure::Text(LATE.into()))
    }

    /// The verdict on a client whose user's browser has gone in the middle of the login.
    pub(super) fn page_gone() -> Verdict {
        Verdict::Refuse("login_broken_off", AuthFailure::Text(GONE.into()))
    }

    /// The verdict on a client that cannot wait for a page now, since too many do.
    pub(super) fn page_busy() -> Verdict {
        Verdict::Refuse("login_busy", AuthFailure::Text(BUSY.into()))
    }

    /// Whether nothing has changed about a user since the password was right.
    pub(super) fn is_current(&self, identity: &Identity) -> bool {
        self.standing(identity) == Standing::Current
    }

    /// What has changed about a user since the password was right.
    pub(super) fn standing(&self, identity: &Identity) -> Standing {
        let (Some(user), Some(generation)) = (&identity.user, identity.generation) else {
            return Standing::Current;
        };
        match lock(&self.users).get(user) {
            Some(user) if user.generation == generation => Standing::Current,
            Some(_) => Standing::Changed,
            None => Standing::Removed,
        }
    }

    /// The option by which a client gets its token.
    pub(super) fn token_option(
        &self,
        settings: &LoginSettings,
        identity: &Identity,
    ) -> Option<String> {
        let (user, token) = (identity.user.as_ref()?, identity.token?);
        let token = self.signer(settings)?.sign(user, token, unix_s());
        Some(format!("auth-token {}", token.expose()))
    }

    /// How often a client gets a new token; `None`: it gets none.
    pub(super) fn token_renewal(settings: &LoginSettings) -> Option<Duration> {
        let (_, renewal_s) = settings::tokens(settings).filter(|_| settings.auth.has_user())?;
        Some(Duration::from_secs(renewal_s))
    }

    /// The option by which a client that has shown no user name learns the one of its token.
    pub(super) fn user_option(settings: &LoginSettings, identity: &Identity) -> Option<String> {
        let user = identity.user.as_ref().filter(|_| settings.auth == Auth::Oidc)?;
        Some(format!("auth-token-user {}", STANDARD.encode(user)))
    }

    /// Judges the answer to [`Verdict::AskCode`]. It may wait for the disk.
    pub(super) fn check_code(&self, identity: Identity, code: &str, from: SocketAddr) -> Verdict {
        let Some(user) = identity.user.clone() else { return refused(WRONG_CODE) };
        let attempt = Attempt::new(&user, from.ip());
        let can = Abilities::default();
        if let Err(wait) = lock(&self.attempts).spend(Instant::now(), &attempt) {
            return later(can, "login_limited", wait, LIMITED);
        }
        if !self.is_current(&identity) || !self.take_code(&user, code) {
            return refused(WRONG_CODE);
        }
        lock(&self.attempts).succeed(attempt);
        Verdict::LetIn(identity)
    }

    /// Whether this is a code of the user's that is good now and was not taken before; it is taken by that.
    fn take_code(&self, user: &str, code: &str) -> bool {
        let secret = lock(&self.users).get(user).and_then(|user| user.totp.clone());
        let now = unix_s();
        let Some(step) = secret.and_then(|secret| totp::step_of(code, &secret, now)) else {
            return false;
        };
        let mut codes = lock(&self.codes);
        if codes.get(user).is_some_and(|taken| *taken >= step) {
            return false;
        }
        let oldest = (now / totp::STEP_S).saturating_sub(totp::STEPS_AROUND);
        codes.retain(|_, taken| *taken >= oldest);
        codes.insert(user.to_owned(), step);
        self.store.save_or_later(CODES_FILE, &*codes);
        drop(codes);
        self.untold.push(user, step);
        true
    }

    fn signer(&self, settings: &LoginSettings) -> Option<TokenSigner> {
        let (lifetime_s, renewal_s) = settings::tokens(settings)?;
        let key = lock(&self.key).clone()?;
        Some(TokenSigner::new(&key, Some(lifetime_s), renewal_s))
    }

    /// Who has shown a token that is good, and may still log in.
    fn check_token(
        &self,
        settings: &LoginSettings,
        user: &str,
        token: &str,
    ) -> Option<(TokenIdentity, Option<u32>)> {
        let (signer, now) = (self.signer(settings)?, unix_s());
        let mut valid = signer.verify(user, token, now).ok()?;
        if (now..=now + AHEAD_MAX_S).contains(&valid.made_s) {
            valid = signer.verify(user, token, valid.made_s).ok()?;
        }
        if valid.is_expired || valid.is_for_empty_user {
            return None;
        }
        let generation = match (&settings.program, settings.auth) {
            (Some(_), _) | (_, Auth::Oidc) => None,
            _ => Some(lock(&self.users).get(user)?.generation),
        };
        let is_its = valid.identity.session.starts_with(&word_of(settings, generation));
        is_its.then_some((valid.identity, generation))
    }

    /// A mark for a user whose code is awaited.
    fn challenge(&self, identity: Identity) -> Option<String> {
        let now = Instant::now();
        let mut challenges = lock(&self.challenges);
        challenges.retain(|_, awaited| awaited.until > now);
        let of_user = challenges.iter().filter(|(_, other)| other.identity.user == identity.user);
        if of_user.clone().count() >= CHALLENGES_PER_USER_MAX {
            let oldest = of_user.min_by_key(|(_, other)| other.until);
            let oldest = oldest.map(|(mark, _)| mark.clone());
            if let Some(mark) = oldest {
                challenges.remove(&mark);
            }
        }
        if challenges.len() >= CHALLENGES_MAX {
            return None;
        }
        let mark = format!("{:032x}", rand::random::<u128>());
        let until = now + Duration::from_secs(CODE_WAIT_S);
        challenges.insert(mark.clone(), Awaited { identity, until });
        Some(mark)
    }

    /// The user whose code is awaited by this mark. A mark is good once.
    fn awaited(&self, mark: &str) -> Option<Identity> {
        let awaited = lock(&self.challenges).remove(mark)?;
        (awaited.until > Instant::now()).then_some(awaited.identity)
    }
}

impl Checking {
    /// Checks the password, and a code that came with it.
    pub(super) async fn run(self) -> Verdict {
        let verdict = match &self.settings.program {
            Some(program) => self.ask_program(program).await,
            None => self.ask_users().await,
        };
        let mut attempts = lock(&self.logins.attempts);
        match &verdict {
            Verdict::LetIn(_) => attempts.succeed(self.attempt),
            // The password was right; codes are counted by themselves.
            Verdict::AskCode(_) | Verdict::Refuse("login_unable" | "login_asked", _) => {
                attempts.take_back(&self.attempt);
            }
            Verdict::Refuse(..) | Verdict::Page(..) => {}
        }
        verdict
    }

    async fn ask_program(&self, program: &Path) -> Verdict {
        let unable = || {
            let wait = Duration::from_secs(BUSY_S.into());
            later(self.ask.can, "login_unable", wait, UNABLE)
        };
        let Ok(_turn) = self.logins.programs.acquire().await else { return unable() };
        let question = Question {
            program,
            directory: &self.logins.runtime_dir,
            user: &self.user,
            password: &self.password,
            certificate: self.ask.certificate.as_ref(),
            from: self.ask.from,
            info: &self.ask.info,
            variables: &self.ask.variables,
        };
        match program::ask(&question).await {
            Ok(Answer::Yes) => Verdict::LetIn(self.identity(None)),
            Ok(Answer::No(reason)) => {
                let text = reason.unwrap_or_else(|| WRONG.into());
                Verdict::Refuse("login_refused", AuthFailure::Text(text))
            }
            Err(error) => {
                tracing::warn!(%error, "the login program gives no answer");
                unable()
            }
        }
    }

    async fn ask_users(&self) -> Verdict {
        let unable = || {
            let wait = Duration::from_secs(BUSY_S.into());
            later(self.ask.can, "login_unable", wait, UNABLE)
        };
        let Ok(_turn) = self.logins.hashing.acquire().await else { return unable() };
        let logins = Arc::clone(&self.logins);
        let (user, form) = (self.user.clone(), PasswordForm::parse(&self.password));
        let checked = tokio::task::spawn_blocking(move || logins.check(&user, &form)).await;
        match checked {
            Ok(Checked::Right(generation)) => Verdict::LetIn(self.identity(Some(generation))),
            Ok(Checked::Wrong(text)) => refused(text),
            Ok(Checked::NeedsCode(generation)) => self.ask_code(self.identity(Some(generation))),
            Err(error) => {
                tracing::error!(%error, "a login failed; this is a bug in weft");
                unable()
            }
        }
    }

    /// Asks for a code: in this session if the client can answer there, else with its next one.
    fn ask_code(&self, identity: Identity) -> Verdict {
        if self.ask.can.answers {
            return Verdict::AskCode(identity);
        }
        let Some(state) = self.logins.challenge(identity) else {
            let wait = Duration::from_secs(BUSY_S.into());
            return later(self.ask.can, "login_busy", wait, BUSY);
        };
        let user = self.user.clone();
        let text = CODE_TEXT.to_owned();
        let challenge = Challenge { echo: true, has_response: true, state, user, text };
        Verdict::Refuse("login_asked", AuthFailure::Challenge(challenge))
    }

    /// Who it is that has just logged in. A later key of a session keeps the session's token.
    fn identity(&self, generation: Option<u32>) -> Identity {
        let known = self.ask.known.as_ref().filter(|known| known.generation == generation);
        let token = known.and_then(|known| known.token).or_else(|| {
            settings::tokens(&self.settings)?;
            Some(new_token(word_of(&self.settings, generation)))
        });
        Identity { name: self.name.clone(), user: Some(self.user.clone()), token, generation }
    }
}

/// What came out of a check, with the user's generation.
enum Checked {
    Right(u32),
    NeedsCode(u32),
    Wrong(&'static str),
}

impl Logins {
    /// Checks what a client put in the place of its password. It takes a core for some time, and may wait for the disk.
    fn check(&self, name: &str, form: &PasswordForm) -> Checked {
        let user = lock(&self.users).get(name).cloned();
        let (password, code) = match form {
            PasswordForm::Plain(password) => (password, None),
            PasswordForm::StaticChallenge { password, response } => (password, Some(response)),
            PasswordForm::DynamicChallenge { state, response } => {
                return self.check_awaited(name, state, response);
            }
        };
        let is_right = User::has_password(user.as_ref(), password.expose());
        let Some(user) = user.filter(|_| is_right) else { return Checked::Wrong(WRONG) };
        match (&user.totp, code) {
            (None, _) => Checked::Right(user.generation),
            (Some(_), None) => Checked::NeedsCode(user.generation),
            (Some(_), Some(code)) if self.take_code(name, code.expose()) => {
                Checked::Right(user.generation)
            }
            (Some(_), Some(_)) => Checked::Wrong(WRONG_CODE),
        }
    }

    fn check_awaited(&self, name: &str, mark: &str, code: &Secret) -> Checked {
        let identity = self.awaited(mark).filter(|awaited| awaited.user.as_deref() == Some(name));
        let Some(identity) = identity.filter(|identity| self.is_current(identity)) else {
            return Checked::Wrong(WRONG_CODE);
        };
        match identity.generation.filter(|_| self.take_code(name, code.expose())) {
            Some(generation) => Checked::Right(generation),
            None => Checked::Wrong(WRONG_CODE),
        }
    }
}

/// Whose word a token stands for: the user's generation, the program that has judged the password, or the identity
/// provider with all that it was asked about a user.
fn word_of(settings: &LoginSettings, generation: Option<u32>) -> [u8; WORD_BYTES] {
    let judge = match &settings.oidc {
        Some(oidc) => oidc::word(oidc),
        None => {
            let program = settings.program.as_deref().unwrap_or(Path::new(""));
            program.as_os_str().as_encoded_bytes().to_vec()
        }
    };
    let judge = digest(&SHA256, &judge);
    let judge: [u8; WORD_BYTES] = judge.as_ref().first_chunk().copied().unwrap_or_default();
    generation.map_or(judge, u32::to_be_bytes)
}

/// A client whose user is to log in by a web page.
fn by_page(ask: &Ask) -> Result<Judged, Verdict> {
    if ask.certificate.is_none() {
        return Err(refused(NO_CERTIFICATE));
    }
    // A session that is renewed has a token.
    if ask.known.is_some() {
        return Err(expired());
    }
    ask.can.page.map(Judged::ByPage).ok_or_else(|| refused(NO_PAGE))
}

fn new_token(word: [u8; WORD_BYTES]) -> TokenIdentity {
    let mut session: [u8; TOKEN_SESSION_BYTES] = rand::random();
    session.iter_mut().zip(word).for_each(|(byte, word)| *byte = word);
    TokenIdentity { session, login_s: unix_s() }
}

fn refused(text: &'static str) -> Verdict {
    Verdict::Refuse("login_refused", AuthFailure::Text(text.into()))
}

fn expired() -> Verdict {
    Verdict::Refuse("login_token_refused", AuthFailure::Session(EXPIRED_TEXT.into()))
}

/// A refusal for a time, as far as the client knows such.
fn later(can: Abilities, counter: &'static str, wait: Duration, text: &str) -> Verdict {
    let backoff_s = Some(u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1));
    let text = text.to_owned();
    let failure = AuthFailure::Temporary { backoff_s, advance: Some(Advance::No), text };
    Verdict::Refuse(counter, if can.waits { failure } else { failure.for_old_client() })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests;
