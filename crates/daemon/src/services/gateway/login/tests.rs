//! Who gets in, who does not, and with which words.
#![allow(clippy::unwrap_used)]

use tempfile::TempDir;
use weft_api::{ClientName, OidcSettings};

use super::*;

const PASSWORD: &str = "correct horse";
/// `IV_PROTO` with a refusal for a time.
const ABLE: &str = "IV_PROTO=256\n";

/// A change of what the administrator wants.
type Change = fn(&mut OidcSettings);

struct Place {
    logins: Arc<Logins>,
    settings: LoginSettings,
    dir: TempDir,
}

impl Place {
    fn new(settings: LoginSettings) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let logins = opened(&dir, &settings);
        Self { logins, settings, dir }
    }

    /// The same after a restart of the daemon.
    fn restarted(self) -> Self {
        Self { logins: opened(&self.dir, &self.settings), ..self }
    }

    async fn add(&self, name: &str, has_codes: bool) -> Option<Zeroizing<String>> {
        let name = name.to_owned();
        let add = move |users: &mut Users| users.add(&name, hash(PASSWORD)?, has_codes);
        self.logins.change(add).await.unwrap()
    }

    async fn judge(&self, ask: Ask) -> Verdict {
        match self.logins.judge(&self.settings, ask) {
            Judged::Now(verdict) => verdict,
            Judged::ByPage(_) => panic!("a page in the place of a password"),
            Judged::Later(checking) => checking.run().await,
        }
    }

    async fn log_in(&self, user: &str, password: &str) -> Verdict {
        self.judge(ask(user, password, None)).await
    }

    fn token(&self, identity: &Identity) -> String {
        let option = self.logins.token_option(&self.settings, identity).unwrap();
        option.strip_prefix("auth-token ").unwrap().to_owned()
    }
}

fn opened(dir: &TempDir, settings: &LoginSettings) -> Arc<Logins> {
    let logins = Logins::new(Store::open(dir.path()).unwrap(), dir.path(), "host", false).unwrap();
    logins.prepare(settings);
    Arc::new(logins)
}

fn passwords() -> LoginSettings {
    LoginSettings { auth: Auth::Password, ..LoginSettings::default() }
}

fn ask(user: &str, password: &str, known: Option<Identity>) -> Ask {
    asking(user, password, known, ABLE)
}

fn asking(user: &str, password: &str, known: Option<Identity>, info: &str) -> Ask {
    let password = Zeroizing::new(password.to_owned());
    let credentials = Credentials::Given { user: user.to_owned(), password };
    let from = "192.0.2.7:4000".parse().unwrap();
    Ask::new(None, credentials, from, known, &PeerInfo::parse(info))
}

fn let_in(verdict: Verdict) -> Identity {
    match verdict {
        Verdict::LetIn(identity) => identity,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_text(verdict: &Verdict, expected: &str) {
    match verdict {
        Verdict::Refuse(_, AuthFailure::Text(text)) => assert_eq!(text, expected),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_password_is_asked_for_once_and_a_token_stands_for_it() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    let identity = let_in(place.log_in("anna", PASSWORD).await);
    assert_eq!((identity.name.as_str(), identity.user.as_deref()), ("anna", Some("anna")));
    let token = place.token(&identity);
    let again = let_in(place.log_in("anna", &token).await);
    assert_eq!(again, identity);
    // A later key, and one after a restart of the daemon.
    let place = place.restarted();
    let renewed = place.judge(ask("anna", &token, Some(identity.clone()))).await;
    assert_eq!(let_in(renewed), identity);
    let is_token_refused = |verdict: &Verdict| {
        matches!(verdict, Verdict::Refuse("login_token_refused", AuthFailure::Session(_)))
    };
    place.add("berta", false).await;
    let verdict = place.log_in("berta", &token).await;
    assert!(is_token_refused(&verdict), "a token of another user: {verdict:?}");
    let set = |users: &mut Users| users.set_password("anna", hash("battery staple")?);
    place.logins.change(set).await.unwrap();
    assert!(!place.logins.is_current(&identity));
    let verdict = place.log_in("anna", &token).await;
    assert!(is_token_refused(&verdict), "a token of before the change: {verdict:?}");
    let identity = let_in(place.log_in("anna", "battery staple").await);
    let token = place.token(&identity);
    place.logins.change(|users| users.remove("anna", true)).await.unwrap();
    let verdict = place.log_in("anna", &token).await;
    assert!(is_token_refused(&verdict), "a token of nobody: {verdict:?}");
    assert!(!place.logins.is_current(&identity));
    // One who is added anew has nothing of the one before.
    place.add("anna", false).await;
    assert!(is_token_refused(&place.log_in("anna", &token).await));
}

#[tokio::test]
async fn a_token_stands_for_the_word_of_one_judge() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    let token = place.token(&let_in(place.log_in("anna", PASSWORD).await));
    let judged_by = |program: &str| LoginSettings { program: Some(program.into()), ..passwords() };
    let place = Place { settings: judged_by("/bin/true"), ..place };
    let verdict = place.log_in("anna", &token).await;
    assert!(matches!(verdict, Verdict::Refuse("login_token_refused", _)), "{verdict:?}");
    let token = place.token(&let_in(place.log_in("anna", "whatever").await));
    let_in(place.log_in("anna", &token).await);
    for settings in [passwords(), judged_by("/bin/false")] {
        let logins = opened(&place.dir, &settings);
        let other = Place { logins, settings, dir: tempfile::tempdir().unwrap() };
        let verdict = other.log_in("anna", &token).await;
        assert!(matches!(verdict, Verdict::Refuse("login_token_refused", _)), "{verdict:?}");
    }
    let place = Place { settings: judged_by("/bin/false"), ..place };
    assert_text(&place.log_in("anna", "whatever").await, WRONG);
}

/// Takes over what the authority's home has, as its gateway does.
fn follow(replica: &Place, home: &Place) {
    let users = home.logins.users_document().unwrap();
    replica.logins.take_users(Some(&users)).unwrap();
    replica.logins.take_key(Some(&home.logins.key_document())).unwrap();
    replica.logins.follow_home().unwrap();
}

#[tokio::test]
async fn users_and_tokens_of_the_home_are_good_on_a_replica_until_they_are_removed() {
    let (home, replica) = (Place::new(passwords()), Place::new(passwords()));
    home.add("anna", false).await;
    replica.add("old", false).await;
    let token = home.token(&let_in(home.log_in("anna", PASSWORD).await));
    assert_text(&replica.log_in("anna", PASSWORD).await, WRONG);
    follow(&replica, &home);
    let identity = let_in(replica.log_in("anna", &token).await);
    let_in(replica.log_in("anna", PASSWORD).await);
    let_in(home.log_in("anna", &replica.token(&identity)).await);
    assert_text(&replica.log_in("old", PASSWORD).await, WRONG);
    // The same after a restart of the replica, whose own files have stayed.
    let logins = Logins::new(replica.logins.store.clone(), replica.dir.path(), "host", true);
    let replica = Place { logins: Arc::new(logins.unwrap()), ..replica };
    let_in(replica.log_in("anna", &token).await);
    let own = Place { logins: opened(&replica.dir, &passwords()), ..Place::new(passwords()) };
    let_in(own.log_in("old", PASSWORD).await);
    for file in [REPLICA_USERS_FILE, REPLICA_KEY_FILE] {
        use std::os::unix::fs::PermissionsExt;
        let metadata = std::fs::metadata(replica.dir.path().join(file)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{file}");
    }
    assert_eq!(replica.logins.standing(&identity), Standing::Current);
    home.logins.change(|users| users.set_totp("anna", false)).await.unwrap();
    follow(&replica, &home);
    assert_eq!(replica.logins.standing(&identity), Standing::Changed);
    home.logins.change(|users| users.remove("anna", true)).await.unwrap();
    follow(&replica, &home);
    assert_eq!(replica.logins.standing(&identity), Standing::Removed);
    assert_eq!(replica.logins.removals()["anna"], 1);
    let verdict = replica.log_in("anna", &token).await;
    assert!(matches!(verdict, Verdict::Refuse("login_token_refused", _)), "{verdict:?}");
}

#[tokio::test]
async fn a_host_whose_clock_is_ahead_makes_tokens_that_are_good_at_once() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    let identity = let_in(place.log_in("anna", PASSWORD).await);
    let signer = place.logins.signer(&place.settings).unwrap();
    let made = |ahead_s: u64| {
        let token = TokenIdentity { login_s: unix_s() + ahead_s, ..identity.token.unwrap() };
        signer.sign("anna", token, unix_s() + ahead_s)
    };
    let_in(place.log_in("anna", made(AHEAD_MAX_S - 10).expose()).await);
    let verdict = place.log_in("anna", made(AHEAD_MAX_S + 60).expose()).await;
    assert!(matches!(verdict, Verdict::Refuse("login_token_refused", _)), "{verdict:?}");
}

#[tokio::test]
async fn documents_that_are_none_change_nothing() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    for document in [None, Some("none"), Some("[]")] {
        assert!(place.logins.take_users(document).is_err(), "{document:?}");
        assert!(place.logins.take_key(document).is_err(), "{document:?}");
    }
    // A home of an earlier version tells neither.
    place.logins.follow_home().unwrap();
    let_in(place.log_in("anna", PASSWORD).await);
}

#[tokio::test]
async fn without_tokens_each_key_needs_the_password() {
    let place = Place::new(LoginSettings { token_lifetime_s: Some(0), ..passwords() });
    place.add("anna", false).await;
    let identity = let_in(place.log_in("anna", PASSWORD).await);
    assert_eq!(place.logins.token_option(&place.settings, &identity), None);
    let again = place.judge(ask("anna", PASSWORD, Some(identity.clone()))).await;
    assert_eq!(let_in(again), identity);
}

#[tokio::test]
async fn wrong_passwords_and_unknown_users_get_the_same_words_until_they_wait() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    for number in 0..5 {
        assert_text(&place.log_in("anna", "wrong horse").await, WRONG);
        assert_text(&place.log_in(&format!("u{number}"), PASSWORD).await, WRONG);
    }
    let verdict = place.log_in("anna", PASSWORD).await;
    let Verdict::Refuse("login_limited", AuthFailure::Temporary { backoff_s, .. }) = verdict else {
        panic!("{verdict:?}")
    };
    assert!(backoff_s.unwrap() <= 31, "{backoff_s:?}");
    let old = place.judge(asking("anna", PASSWORD, None, "IV_VER=2.4\n")).await;
    assert_text(&old, LIMITED);
    // Elsewhere she gets in.
    let mut elsewhere = ask("anna", PASSWORD, None);
    elsewhere.from = "192.0.2.8:4000".parse().unwrap();
    let_in(place.judge(elsewhere).await);
}

#[tokio::test]
async fn a_later_key_is_for_the_same_user() {
    let place = Place::new(passwords());
    place.add("anna", false).await;
    place.add("berta", false).await;
    let identity = let_in(place.log_in("anna", PASSWORD).await);
    let other = place.judge(ask("berta", PASSWORD, Some(identity))).await;
    assert_text(&other, OTHER_USER);
    let nothing = Ask { credentials: Credentials::Missing, ..ask("", "", None) };
    assert_text(&place.judge(nothing).await, NEEDED);
}

#[tokio::test]
async fn too_many_who_wait_are_told_to_come_again() {
    let place = Place::new(passwords());
    let _all = Arc::clone(&place.logins.waiting).acquire_many_owned(256).await.unwrap();
    for _ in 0..20 {
        let verdict = place.log_in("anna", PASSWORD).await;
        let is_busy =
            matches!(verdict, Verdict::Refuse("login_busy", AuthFailure::Temporary { .. }));
        assert!(is_busy, "it counts as a failed attempt: {verdict:?}");
    }
}

fn code(secret: &str) -> String {
    totp::code_now(secret, unix_s())
}

fn with_code(code: &str) -> String {
    let (password, response) = (Secret::new(PASSWORD), Secret::new(code));
    PasswordForm::StaticChallenge { password, response }.to_secret().expose().to_owned()
}

#[tokio::test]
async fn a_code_is_taken_once_with_the_password() {
    let place = Place::new(passwords());
    let secret = place.add("anna", true).await.unwrap();
    let good = with_code(&code(&secret));
    let identity = let_in(place.log_in("anna", &good).await);
    assert_text(&place.log_in("anna", &good).await, WRONG_CODE);
    assert_text(&place.log_in("anna", &with_code("")).await, WRONG_CODE);
    // Nor after a restart. A token needs no code.
    let token = place.token(&identity);
    let place = place.restarted();
    assert_text(&place.log_in("anna", &good).await, WRONG_CODE);
    let_in(place.log_in("anna", &token).await);
    // One without codes may use the same profile.
    place.add("berta", false).await;
    let_in(place.log_in("berta", &with_code("")).await);
}

#[tokio::test]
async fn a_code_that_another_host_has_taken_is_not_taken_again() {
    let (home, replica) = (Place::new(passwords()), Place::new(passwords()));
    let secret = home.add("anna", true).await.unwrap();
    follow(&replica, &home);
    let good = with_code(&code(&secret));
    let_in(home.log_in("anna", &good).await);
    let mut told = home.logins.codes_taken().await;
    assert!(told.len() == 1 && told[0].0 == "anna", "{told:?}");
    // A step of the far future, and a user that there is not, are no news.
    told.extend([("anna".to_owned(), u64::MAX), ("berta".to_owned(), 1)]);
    replica.logins.hear_codes(told.clone());
    assert_text(&replica.log_in("anna", &good).await, WRONG_CODE);
    assert_eq!(*lock(&replica.logins.codes), BTreeMap::from([told[0].clone()]));
}

#[tokio::test]
async fn who_gives_a_password_alone_is_asked_for_a_code() {
    let place = Place::new(passwords());
    let secret = place.add("anna", true).await.unwrap();
    let verdict = place.log_in("anna", PASSWORD).await;
    let Verdict::Refuse("login_asked", AuthFailure::Challenge(challenge)) = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!((challenge.user.as_str(), challenge.text.as_str()), ("anna", CODE_TEXT));
    place.add("berta", false).await;
    let answer = challenge.answer(&code(&secret));
    assert_text(&place.log_in("berta", answer.expose()).await, WRONG_CODE);
    assert_text(&place.log_in("anna", answer.expose()).await, WRONG_CODE);
    // A mark is good once: that one is gone.
    let verdict = place.log_in("anna", PASSWORD).await;
    let Verdict::Refuse(_, AuthFailure::Challenge(challenge)) = verdict else { panic!() };
    let_in(place.log_in("anna", challenge.answer(&code(&secret)).expose()).await);
}

#[tokio::test]
async fn one_user_with_many_open_questions_keeps_nobody_out() {
    let place = Place::new(passwords());
    let asked = |user: &str| {
        let (name, user) = (user.to_owned(), Some(user.to_owned()));
        place.logins.challenge(Identity { name, user, token: None, generation: Some(1) })
    };
    let first = asked("anna").unwrap();
    let all: Vec<String> = (0..CHALLENGES_MAX).filter_map(|_| asked("anna")).collect();
    assert_eq!(all.len(), CHALLENGES_MAX);
    let other = asked("berta").unwrap();
    assert!(place.logins.awaited(&first).is_none(), "the oldest is as good as ever");
    assert!(place.logins.awaited(all.last().unwrap()).is_some());
    assert!(place.logins.awaited(&other).is_some());
}

#[tokio::test]
async fn a_client_that_can_answers_in_the_same_session() {
    let place = Place::new(passwords());
    let secret = place.add("anna", true).await.unwrap();
    let able = || asking("anna", PASSWORD, None, "IV_SSO=webauth,crtext\n");
    let from = "192.0.2.7:4000".parse().unwrap();
    let Verdict::AskCode(identity) = place.judge(able()).await else { panic!("no question") };
    assert_text(&place.logins.check_code(identity.clone(), "12345", from), WRONG_CODE);
    let right = code(&secret);
    let_in(place.logins.check_code(identity.clone(), &right, from));
    assert_text(&place.logins.check_code(identity, &right, from), WRONG_CODE);
    let Verdict::AskCode(identity) = place.judge(able()).await else { panic!("no question") };
    place.logins.change(|users| users.remove("anna", true)).await.unwrap();
    assert_text(&place.logins.check_code(identity, &right, from), WRONG_CODE);
}

#[tokio::test]
async fn no_secret_is_shown_and_files_are_for_root_alone() {
    use std::os::unix::fs::PermissionsExt;

    let place = Place::new(passwords());
    let secret = place.add("anna", true).await.unwrap();
    let identity = let_in(place.log_in("anna", &with_code(&code(&secret))).await);
    let token = place.token(&identity);
    let text = format!("{identity:?} {:?}", place.log_in("anna", "wrong horse").await);
    assert!(!text.contains(&token) && !text.contains("wrong horse"), "{text}");
    for file in [USERS_FILE, CODES_FILE, KEY_FILE] {
        let mode = std::fs::metadata(place.dir.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
        let text = std::fs::read_to_string(place.dir.path().join(file)).unwrap();
        assert!(!text.contains(PASSWORD) && !text.contains(&token), "{file}");
    }
}

fn by_provider() -> LoginSettings {
    let oidc = OidcSettings {
        issuer: "https://id.example.com".into(),
        client_id: "weft".into(),
        ..OidcSettings::default()
    };
    LoginSettings { auth: Auth::Oidc, oidc: Some(oidc), ..LoginSettings::default() }
}

/// A client with a certificate of this name.
fn showing(certificate: &str, credentials: Credentials, info: &str) -> Ask {
    let holder = Holder { name: certificate.into(), ..Holder::default() };
    let from = "192.0.2.7:4000".parse().unwrap();
    Ask::new(Some(holder), credentials, from, None, &PeerInfo::parse(info))
}

fn given(user: &str, password: &str) -> Credentials {
    Credentials::Given { user: user.into(), password: Zeroizing::new(password.into()) }
}

#[tokio::test]
async fn a_program_is_not_asked_about_a_blank_user_name() {
    let settings = LoginSettings {
        auth: Auth::Both,
        client_name: ClientName::Certificate,
        program: Some("/bin/true".into()),
        ..LoginSettings::default()
    };
    let place = Place::new(settings);
    assert_text(&place.judge(showing("laptop", given("", "x"), ABLE)).await, NEEDED);
    let_in(place.judge(showing("laptop", given("anna", "x"), ABLE)).await);
}

#[tokio::test]
async fn a_page_is_for_clients_with_a_certificate_that_show_pages() {
    let place = Place::new(by_provider());
    let judged = |ask: Ask| place.logins.judge(&place.settings, ask);
    for (info, expected) in [
        ("IV_SSO=crtext,webauth,openurl\n", PageWay::WebAuth),
        ("IV_SSO=openurl,crtext\n", PageWay::OpenUrl),
    ] {
        // A password means nothing here.
        for credentials in [Credentials::Missing, given("anna", PASSWORD)] {
            let judged = judged(showing("anna", credentials, info));
            assert!(matches!(judged, Judged::ByPage(way) if way == expected), "{info}");
        }
    }
    assert_text(&place.judge(showing("anna", Credentials::Missing, ABLE)).await, NO_PAGE);
    let nobody = asking("anna", PASSWORD, None, "IV_SSO=webauth\n");
    assert_text(&place.judge(nobody).await, NO_CERTIFICATE);
}

#[tokio::test]
async fn a_login_by_a_page_is_for_the_certificate_of_that_user() {
    let place = Place::new(by_provider());
    let after = |settings: &LoginSettings, user: &str| {
        place.logins.after_page(settings, Some("laptop"), Ok(user.to_owned()))
    };
    assert_text(&after(&place.settings, "anna"), OTHER_USER);
    let identity = let_in(after(&place.settings, "laptop"));
    assert_eq!((identity.name.as_str(), identity.user.as_deref()), ("laptop", Some("laptop")));
    let by = |client_name| LoginSettings { client_name, ..by_provider() };
    assert_eq!(let_in(after(&by(ClientName::User), "anna")).name, "anna");
    assert_eq!(let_in(after(&by(ClientName::Certificate), "anna")).name, "laptop");
    assert_text(&after(&by(ClientName::User), "a/b"), NO_NAME);
    let refused = Err("You are in no group that may connect".to_owned());
    let refused = place.logins.after_page(&place.settings, Some("laptop"), refused);
    assert_text(&refused, "You are in no group that may connect");
}

#[tokio::test]
async fn a_token_stands_for_the_word_of_a_provider_that_is_asked_the_same() {
    let place = Place::new(by_provider());
    let user = Ok("anna".to_owned());
    let identity = let_in(place.logins.after_page(&place.settings, Some("anna"), user));
    let user = Logins::user_option(&place.settings, &identity);
    assert_eq!(user.as_deref(), Some("auth-token-user YW5uYQ=="));
    let token = place.token(&identity);
    let place = place.restarted();
    // A client that shows no page, since none is needed.
    let with_token = |certificate: &str| showing(certificate, given("anna", &token), ABLE);
    assert_eq!(let_in(place.judge(with_token("anna")).await), identity);
    let later = |credentials| Ask {
        known: Some(identity.clone()),
        ..showing("anna", credentials, "IV_SSO=webauth\n")
    };
    assert_eq!(let_in(place.judge(later(given("anna", &token))).await), identity);
    assert_text(&place.judge(with_token("berta")).await, OTHER_USER);
    let is_token_refused = |verdict: &Verdict| {
        matches!(verdict, Verdict::Refuse("login_token_refused", AuthFailure::Session(_)))
    };
    let verdict = place.judge(later(Credentials::Missing)).await;
    assert!(is_token_refused(&verdict), "a later key without a token: {verdict:?}");
    let verdict =
        place.judge(showing("anna", given("anna", &token[..token.len() - 4]), ABLE)).await;
    assert!(is_token_refused(&verdict), "a part of a token: {verdict:?}");
    let changes: [(bool, Change); 7] = [
        (true, |it| it.redirect.push('x')),
        (true, |it| it.wait_s = Some(60)),
        (false, |it| it.issuer.push('x')),
        (false, |it| it.client_id.push('x')),
        (false, |it| it.claim = Some("email".into())),
        (false, |it| it.groups.push("vpn".into())),
        (false, |it| it.groups_claim = Some("roles".into())),
    ];
    for (number, (is_good, change)) in changes.into_iter().enumerate() {
        let mut settings = by_provider();
        change(settings.oidc.as_mut().unwrap());
        let Judged::Now(verdict) = place.logins.judge(&settings, with_token("anna")) else {
            panic!("change {number} asks for more")
        };
        match is_good {
            true => assert_eq!(let_in(verdict), identity, "change {number}"),
            false => assert!(is_token_refused(&verdict), "change {number}: {verdict:?}"),
        }
    }
}
