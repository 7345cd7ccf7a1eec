//! The identity provider: its document, its keys, and what it says of a login.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use data_encoding::BASE64URL_NOPAD;
use form_urlencoded::Serializer;
use hyper::StatusCode;
use jsonwebtoken::jwk::JwkSet;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::Mutex;
use weft_api::OidcSettings;
use zeroize::Zeroizing;

use super::https::{Answer, Ask, Https, HttpsError};
use super::id_token::{self, Claims, Expected, TokenFault};
use super::pending::Marks;
use super::settings::{Place, claim, groups_claim, provider_port};

/// Where a provider's document is, behind its issuer (OpenID Connect Discovery 1.0, section 4).
const DOCUMENT: &str = "/.well-known/openid-configuration";
/// How long document and keys are good for.
const FRESH: Duration = Duration::from_secs(3_600);
/// The shortest time between two requests for them, also where there was no answer. So a provider that is away holds up one
/// browser, and not each in turn.
const AGAIN: Duration = Duration::from_secs(10);
/// The scopes that are always asked for.
const SCOPES: &str = "openid profile email";
/// The longest name of a user, in bytes.
const USER_BYTES_MAX: usize = 128;
/// Letters of an error's word that are shown.
const ERROR_CHARS_MAX: usize = 64;

/// A login that fails.
#[derive(Debug, thiserror::Error)]
pub(in super::super::super) enum OidcError {
    /// The provider cannot be asked.
    #[error(transparent)]
    Https(#[from] HttpsError),
    /// The daemon's own sandbox, and no restart changes it.
    #[error(
        "{host} is asked at port {port}, to which this daemon may not connect (Landlock): have the provider name URLs at port 443, or at the port of its issuer"
    )]
    Port {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// What came of it when it was asked a moment ago.
    #[error("{0}")]
    Before(Arc<OidcError>),
    /// It answers that it will not.
    #[error("{url} answers with {status}{}", word(error))]
    Status {
        /// What was asked.
        url: String,
        /// The code of HTTP.
        status: StatusCode,
        /// The word of OAuth, if there is one.
        error: Option<String>,
    },
    /// Its answer means nothing.
    #[error("the answer of {url} cannot be read: {error}")]
    Answer {
        /// What was asked.
        url: String,
        /// Why.
        error: String,
    },
    /// The document is of another provider, or a forgery.
    #[error("{url} says that its issuer is {said:?}: give that as --oidc-issuer, if it is right")]
    Issuer {
        /// The document.
        url: String,
        /// The issuer in it.
        said: String,
    },
    /// The ID token is not good.
    #[error(transparent)]
    Token(#[from] TokenFault),
    /// The provider says another user than in its token.
    #[error("the provider's words about the user are of another user than its ID token")]
    OtherSubject,
    /// The claim that names the user is not there.
    #[error(
        "the provider tells no {0} of the user: name another claim by --oidc-claim, or ask for its scope by --oidc-scope"
    )]
    NoUser(String),
    /// The user's mail address is whatever he has written.
    #[error("the provider does not say that it has verified the user's mail address")]
    Unverified,
    /// The user is in none of the groups.
    #[error("the user {0} is in none of the groups that are let in")]
    Group(String),
}

impl OidcError {
    /// Whether the daemon's own sandbox forbids it until the daemon is restarted.
    pub(super) fn is_forbidden(&self) -> bool {
        match self {
            Self::Https(error) => matches!(error, HttpsError::Forbidden { .. }),
            Self::Before(error) => error.is_forbidden(),
            _ => false,
        }
    }

    /// What the user gets to see.
    pub(super) fn for_user(&self) -> String {
        match self {
            Self::Https(_) | Self::Port { .. } => {
                "The identity provider cannot be reached by the gateway".into()
            }
            Self::Before(error) => error.for_user(),
            Self::Status { .. } | Self::Answer { .. } | Self::Issuer { .. } => {
                "The identity provider refuses the login".into()
            }
            Self::Token(_) | Self::OtherSubject => {
                "The login at the identity provider is not valid".into()
            }
            Self::NoUser(_) => "The identity provider does not name you to the gateway".into(),
            Self::Unverified => "Your mail address is not verified".into(),
            Self::Group(_) => "You are in no group that may connect".into(),
        }
    }
}

fn word(error: &Option<String>) -> String {
    error.as_ref().map(|error| format!(" ({error})")).unwrap_or_default()
}

/// A word of OAuth, without what could be written elsewhere.
pub(super) fn plain(word: &str) -> String {
    let is_plain = |char: &char| char.is_ascii_alphanumeric() || "_-.".contains(*char);
    word.chars().filter(is_plain).take(ERROR_CHARS_MAX).collect()
}

/// What the provider's document says.
#[derive(Deserialize)]
struct Document {
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    jwks_uri: String,
    userinfo_endpoint: Option<String>,
    #[serde(default)]
    token_endpoint_auth_methods_supported: Vec<String>,
}

/// What is known of the provider.
struct Known {
    document: Document,
    keys: JwkSet,
    since: Instant,
}

/// What has come of asking for it.
#[derive(Default)]
struct Kept {
    known: Option<Arc<Known>>,
    /// The last error, if nothing better has come since, and when.
    fault: Option<(Instant, Arc<OidcError>)>,
}

#[derive(Deserialize)]
struct Tokens {
    id_token: Zeroizing<String>,
    access_token: Option<Zeroizing<String>>,
}

#[derive(Deserialize)]
struct Refusal {
    error: Option<String>,
}

/// The provider.
pub(super) struct Provider {
    settings: OidcSettings,
    secret: Option<Zeroizing<String>>,
    https: Https,
    kept: Mutex<Kept>,
}

impl Provider {
    /// A provider that has not been asked anything yet. It reads files.
    ///
    /// # Errors
    /// The authorities cannot be read.
    pub(super) fn new(
        settings: &OidcSettings,
        secret: Option<Zeroizing<String>>,
    ) -> Result<Self, OidcError> {
        let https = Https::new(settings.ca.as_deref().map(Path::new))?;
        Ok(Self { settings: settings.clone(), secret, https, kept: Mutex::default() })
    }

    /// Asks for document and keys, so that the first login need not.
    ///
    /// # Errors
    /// [`OidcError`]
    pub(super) async fn look(&self) -> Result<(), OidcError> {
        self.known(None).await.map(drop)
    }

    /// The page of the provider where the user logs in.
    ///
    /// # Errors
    /// [`OidcError`]
    pub(super) async fn page(&self, marks: &Marks) -> Result<String, OidcError> {
        let known = self.known(None).await?;
        let at = &known.document.authorization_endpoint;
        let challenge = digest(&SHA256, marks.verifier.as_bytes());
        let mut scopes = SCOPES.to_owned();
        self.settings.scopes.iter().for_each(|scope| scopes.extend([" ", scope.as_str()]));
        let mut query = Serializer::new(String::new());
        query
            .append_pair("response_type", "code")
            .append_pair("client_id", &self.settings.client_id)
            .append_pair("redirect_uri", &self.settings.redirect)
            .append_pair("scope", &scopes)
            .append_pair("state", &marks.state)
            .append_pair("nonce", &marks.nonce)
            .append_pair("code_challenge", &BASE64URL_NOPAD.encode(challenge.as_ref()))
            .append_pair("code_challenge_method", "S256");
        let joint = if at.contains('?') { '&' } else { '?' };
        Ok(format!("{at}{joint}{}", query.finish()))
    }

    /// Who has logged in, by the code that a browser has brought.
    ///
    /// # Errors
    /// [`OidcError`]
    pub(super) async fn user(
        &self,
        code: &str,
        verifier: &str,
        nonce: &str,
    ) -> Result<String, OidcError> {
        let known = self.known(None).await?;
        let tokens = self.tokens(&known.document, code, verifier).await?;
        let mut claims = match self.verify(&known, &tokens, nonce).await {
            // It has changed its keys.
            Err(fault) if fault.may_be_of_other_keys() => {
                let known = self.known(Some(&known)).await?;
                self.verify(&known, &tokens, nonce).await?
            }
            verified => verified?,
        };
        let groups = groups_claim(&self.settings);
        let has_groups = self.settings.groups.is_empty() || claims.contains_key(groups);
        let needs_more = !has_groups || !claims.contains_key(claim(&self.settings));
        if needs_more
            && let (Some(url), Some(access)) =
                (&known.document.userinfo_endpoint, &tokens.access_token)
        {
            claims = joined(claims, self.userinfo(url, access).await?)?;
        }
        user_of(&claims, &self.settings)
    }

    /// The claims of the ID token. Public-key work is done on a thread of its own.
    async fn verify(
        &self,
        known: &Arc<Known>,
        tokens: &Tokens,
        nonce: &str,
    ) -> Result<Claims, TokenFault> {
        let (known, token) = (Arc::clone(known), tokens.id_token.clone());
        let (client_id, nonce) = (self.settings.client_id.clone(), nonce.to_owned());
        let verified = tokio::task::spawn_blocking(move || {
            let issuer = &known.document.issuer;
            let expected = Expected { issuer, client_id: &client_id, nonce: &nonce };
            id_token::verify(&token, &known.keys, &expected)
        });
        verified.await.unwrap_or_else(|error| Err(TokenFault::Malformed(error.to_string())))
    }

    async fn tokens(
        &self,
        document: &Document,
        code: &str,
        verifier: &str,
    ) -> Result<Tokens, OidcError> {
        let (form, authorization) = self.form(document, code, verifier);
        let authorization = authorization.as_deref().map(String::as_str);
        self.ask(Ask { url: &document.token_endpoint, authorization, form: Some(form) }).await
    }

    /// What is posted for a code, and the value of `Authorization`.
    fn form(
        &self,
        document: &Document,
        code: &str,
        verifier: &str,
    ) -> (Zeroizing<String>, Option<Zeroizing<String>>) {
        let OidcSettings { client_id, redirect, .. } = &self.settings;
        let mut form = Serializer::new(String::new());
        form.append_pair("grant_type", "authorization_code")
            .append_pair("code", code)
            .append_pair("redirect_uri", redirect)
            .append_pair("code_verifier", verifier);
        let methods = &document.token_endpoint_auth_methods_supported;
        let has = |method: &str| methods.iter().any(|known| known == method);
        let mut authorization = None;
        match &self.secret {
            None => _ = form.append_pair("client_id", client_id),
            // RFC 6749, section 2.3.1: what a provider takes that says nothing.
            Some(secret) if has("client_secret_basic") || !has("client_secret_post") => {
                authorization = Some(basic(client_id, secret));
            }
            Some(secret) => {
                form.append_pair("client_id", client_id).append_pair("client_secret", secret);
            }
        }
        (Zeroizing::new(form.finish()), authorization)
    }

    async fn userinfo(&self, url: &str, access: &str) -> Result<Claims, OidcError> {
        let bearer = Zeroizing::new(format!("Bearer {access}"));
        self.ask(Ask { url, authorization: Some(&bearer), form: None }).await
    }

    /// Document and keys, which are asked for if they are old, or are those that did not do.
    async fn known(&self, stale: Option<&Arc<Known>>) -> Result<Arc<Known>, OidcError> {
        let mut kept = self.kept.lock().await;
        if let Some(known) = &kept.known {
            let age = known.since.elapsed();
            let is_stale = stale.is_some_and(|stale| Arc::ptr_eq(stale, known)) && age >= AGAIN;
            if age < FRESH && !is_stale {
                return Ok(Arc::clone(known));
            }
        }
        if let Some((at, error)) = &kept.fault
            && at.elapsed() < AGAIN
        {
            return Err(OidcError::Before(Arc::clone(error)));
        }
        match self.fetched().await {
            Ok(known) => {
                let known = Arc::new(known);
                *kept = Kept { known: Some(Arc::clone(&known)), fault: None };
                Ok(known)
            }
            Err(error) => {
                let error = Arc::new(error);
                kept.fault = Some((Instant::now(), Arc::clone(&error)));
                Err(OidcError::Before(error))
            }
        }
    }

    async fn fetched(&self) -> Result<Known, OidcError> {
        let issuer = &self.settings.issuer;
        let url = format!("{}{DOCUMENT}", issuer.trim_end_matches('/'));
        let document: Document = self.get(&url).await?;
        if document.issuer != *issuer {
            return Err(OidcError::Issuer { url, said: document.issuer });
        }
        let at = &document.authorization_endpoint;
        if Place::of(at).is_none() {
            return Err(HttpsError::Url(at.clone()).into());
        }
        let keys = self.get(&document.jwks_uri).await?;
        Ok(Known { document, keys, since: Instant::now() })
    }

    async fn get<T: DeserializeOwned>(&self, url: &str) -> Result<T, OidcError> {
        self.ask(Ask { url, authorization: None, form: None }).await
    }

    async fn ask<T: DeserializeOwned>(&self, ask: Ask<'_>) -> Result<T, OidcError> {
        let url = ask.url.to_owned();
        let is_public = ask.authorization.is_none() && ask.form.is_none();
        let answered = self.https.ask(ask).await.map_err(|error| self.told(error));
        let Answer { status, body } = answered?;
        if status != StatusCode::OK {
            let said = serde_json::from_slice::<Refusal>(&body).ok();
            let error = said.and_then(|said| said.error).map(|word| plain(&word));
            return Err(OidcError::Status { url, status, error });
        }
        serde_json::from_slice(&body)
            .map_err(|error| OidcError::Answer { url, error: unread(&error, is_public) })
    }

    /// An error as the administrator is told of it: a restart opens the issuer's port alone.
    fn told(&self, error: HttpsError) -> OidcError {
        match error {
            HttpsError::Forbidden { host, port }
                if provider_port(&self.settings.issuer) != Some(port) =>
            {
                OidcError::Port { host, port }
            }
            error => error.into(),
        }
    }
}

/// Why an answer cannot be read. The library's words may quote it, and it may have tokens.
fn unread(error: &serde_json::Error, is_public: bool) -> String {
    match error.classify() {
        _ if is_public => error.to_string(),
        Category::Eof => "it breaks off".into(),
        Category::Data => "a part of it is missing, or of another kind".into(),
        Category::Io | Category::Syntax => "it is no JSON".into(),
    }
}

/// The header of a client with a secret (RFC 6749, section 2.3.1).
fn basic(client_id: &str, secret: &str) -> Zeroizing<String> {
    let encoded = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
    let both = Zeroizing::new(format!("{}:{}", encoded(client_id), encoded(secret)));
    Zeroizing::new(format!("Basic {}", STANDARD.encode(both.as_bytes())))
}

/// The claims of an ID token, and those that it lacks of the userinfo endpoint (OpenID Connect Core 1.0, section 5.3.2).
fn joined(mut claims: Claims, more: Claims) -> Result<Claims, OidcError> {
    if more.get("sub") != claims.get("sub") {
        return Err(OidcError::OtherSubject);
    }
    more.into_iter().for_each(|(name, value)| _ = claims.entry(name).or_insert(value));
    Ok(claims)
}

/// The user whom these claims name, if he may be let in.
fn user_of(claims: &Claims, settings: &OidcSettings) -> Result<String, OidcError> {
    let name = claim(settings);
    let user = claims.get(name).and_then(|value| value.as_str());
    let is_name = |user: &&str| {
        (1..=USER_BYTES_MAX).contains(&user.len()) && !user.contains(|char: char| char.is_control())
    };
    let user = user.filter(is_name).ok_or_else(|| OidcError::NoUser(name.to_owned()))?;
    let is_verified = || match claims.get("email_verified") {
        Some(serde_json::Value::Bool(is_verified)) => *is_verified,
        Some(serde_json::Value::String(text)) => text == "true",
        _ => false,
    };
    if name == "email" && !is_verified() {
        return Err(OidcError::Unverified);
    }
    let is_wanted = |value: &serde_json::Value| {
        value.as_str().is_some_and(|group| settings.groups.iter().any(|wanted| wanted == group))
    };
    let is_in = match claims.get(groups_claim(settings)) {
        Some(serde_json::Value::Array(groups)) => groups.iter().any(is_wanted),
        Some(group) => is_wanted(group),
        None => false,
    };
    if !settings.groups.is_empty() && !is_in {
        return Err(OidcError::Group(user.to_owned()));
    }
    Ok(user.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn claims(value: &serde_json::Value) -> Claims {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn a_user_has_a_name_and_a_group_of_those_that_are_let_in() {
        let settings =
            OidcSettings { groups: vec!["vpn".into(), "it".into()], ..Default::default() };
        let of = |value: serde_json::Value| user_of(&claims(&value), &settings);
        let anna = of(json!({ "preferred_username": "anna", "groups": ["staff", "it"] }));
        assert_eq!(anna.unwrap(), "anna");
        assert_eq!(of(json!({ "preferred_username": "anna", "groups": "vpn" })).unwrap(), "anna");
        for groups in
            [json!(["staff"]), json!([]), json!("vpnx"), json!({ "vpn": true }), json!(null)]
        {
            let refused = of(json!({ "preferred_username": "anna", "groups": groups }));
            assert!(matches!(refused, Err(OidcError::Group(_))), "{groups}");
        }
        assert!(matches!(of(json!({ "preferred_username": "anna" })), Err(OidcError::Group(_))));
        for user in [json!(""), json!(7), json!(null), json!("a\nb"), json!("a".repeat(129))] {
            let refused = of(json!({ "preferred_username": user, "groups": ["vpn"] }));
            assert!(matches!(refused, Err(OidcError::NoUser(_))), "{user}");
        }
    }

    #[test]
    fn claims_of_another_subject_are_not_joined() {
        let token = || claims(&json!({ "sub": "u1", "groups": ["staff"] }));
        let more = claims(&json!({ "sub": "u1", "groups": ["vpn"], "preferred_username": "anna" }));
        let all = joined(token(), more).unwrap();
        assert_eq!(all["preferred_username"], "anna");
        assert_eq!(all["groups"], json!(["staff"]), "the token's word counts");
        for more in [json!({ "sub": "u2" }), json!({ "sub": null }), json!({})] {
            let refused = joined(token(), claims(&more));
            assert!(matches!(refused, Err(OidcError::OtherSubject)), "{more}");
        }
    }

    #[test]
    fn a_mail_address_counts_if_the_provider_has_verified_it() {
        let settings = OidcSettings { claim: Some("email".into()), ..Default::default() };
        let of = |value: serde_json::Value| user_of(&claims(&value), &settings);
        let mail = "anna@example.com";
        for verified in [json!(true), json!("true")] {
            assert_eq!(of(json!({ "email": mail, "email_verified": verified })).unwrap(), mail);
        }
        for verified in [json!(false), json!("false"), json!(1), json!(null)] {
            let refused = of(json!({ "email": mail, "email_verified": verified }));
            assert!(matches!(refused, Err(OidcError::Unverified)), "{verified}");
        }
        assert!(matches!(of(json!({ "email": mail })), Err(OidcError::Unverified)));
    }

    #[test]
    fn a_secret_is_written_as_oauth_has_it() {
        // RFC 6749: both parts are encoded as a form is, and then joined.
        let header = basic("we:ft", "a b%");
        let text = STANDARD.decode(header.strip_prefix("Basic ").unwrap()).unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), "we%3Aft:a+b%25");
        assert_eq!(plain("invalid_grant\r\nX: <b>"), "invalid_grantXb");
    }

    #[test]
    fn an_answer_with_tokens_is_not_quoted() {
        let body = r#"{ "id_token": ["secret"], "access_token": "secret" }"#;
        let error = serde_json::from_str::<Tokens>(body).err().unwrap();
        assert!(unread(&error, true).contains("expected a string"), "{error}");
        for body in [body, r#""secret""#, r#"{ "id_token": "secret" "#, "secret", "{}"] {
            let error = serde_json::from_str::<Tokens>(body).err().unwrap();
            assert!(!unread(&error, false).contains("secret"), "{error}");
        }
    }

    /// A provider that nothing listens for.
    async fn absent() -> Provider {
        let dir = tempfile::tempdir().unwrap();
        let ca = dir.path().join("ca.pem");
        let authority = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
        std::fs::write(&ca, authority.cert.pem()).unwrap();
        let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let issuer = format!("https://{}", free.local_addr().unwrap());
        let settings = OidcSettings { issuer, ca: Some(ca), ..OidcSettings::default() };
        Provider::new(&settings, None).unwrap()
    }

    #[tokio::test]
    async fn a_provider_that_is_away_is_asked_again_after_a_pause_alone() {
        let provider = absent().await;
        let first = provider.look().await.unwrap_err();
        assert!(first.to_string().contains("cannot connect to 127.0.0.1"), "{first}");
        assert!(first.for_user().contains("cannot be reached"), "{first}");
        let at = |kept: &Kept| kept.fault.as_ref().unwrap().0;
        let before = at(&*provider.kept.lock().await);
        let second = provider.look().await.unwrap_err();
        assert_eq!(second.to_string(), first.to_string());
        assert_eq!(at(&*provider.kept.lock().await), before, "it was asked at once");
        if let Some((at, _)) = &mut provider.kept.lock().await.fault {
            *at -= AGAIN;
        }
        provider.look().await.unwrap_err();
        assert!(at(&*provider.kept.lock().await) > before, "it was not asked again");
    }

    #[tokio::test]
    async fn a_port_that_a_restart_does_not_open_is_told_so() {
        let provider = absent().await;
        let port = provider_port(&provider.settings.issuer).unwrap();
        let told = |port: u16| provider.told(HttpsError::Forbidden { host: "id".into(), port });
        assert!(told(port).is_forbidden());
        let other = told(port ^ 1);
        assert!(!other.is_forbidden() && other.to_string().contains("name URLs at port 443"));
    }
}
