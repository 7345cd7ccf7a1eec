//! What `weft openvpn serve` may ask for of logins, and what a name means.

use weft_api::{Auth, ClientName, LoginSettings};

use super::{oidc, program};
use crate::services::gateway::authority::check_name;

/// How long a token stands for the password unless it is said otherwise, in seconds: a working day.
const TOKEN_LIFETIME_S: u32 = 43_200;
/// The longest lifetime, in seconds: ten years, in the place of none.
pub(in super::super) const TOKEN_LIFETIME_S_MAX: u32 = 315_360_000;
/// How often a token is renewed unless it is said otherwise, in seconds: as often as keys are.
const TOKEN_RENEWAL_S: u32 = 3_600;

/// Tokens of these settings: lifetime and renewal in seconds; `None`: there are none.
pub(super) fn tokens(settings: &LoginSettings) -> Option<(u64, u64)> {
    let lifetime_s = settings.token_lifetime_s.unwrap_or(TOKEN_LIFETIME_S);
    let renewal_s = settings.token_renewal_s.unwrap_or(TOKEN_RENEWAL_S);
    (lifetime_s > 0).then_some((lifetime_s.into(), renewal_s.into()))
}

/// Why these settings cannot be, in words for the administrator.
pub(in super::super) fn fault(settings: &LoginSettings) -> Option<String> {
    let LoginSettings { auth, client_name, program, token_lifetime_s, token_renewal_s, .. } =
        settings;
    if *client_name != ClientName::Same && !matches!(auth, Auth::Both | Auth::Oidc) {
        return Some(
            "a client with one name is known by that: --client-name goes with --auth both or --auth oidc"
                .into(),
        );
    }
    let has_tokens = token_lifetime_s.is_some() || token_renewal_s.is_some();
    if program.is_some() && !auth.has_password() || has_tokens && !auth.has_user() {
        let text = "no password is asked for: use --auth password or --auth both";
        return Some(text.into());
    }
    if let Some(fault) = oidc_fault(settings) {
        return Some(fault);
    }
    if token_lifetime_s.is_some_and(|it| it > TOKEN_LIFETIME_S_MAX) || *token_renewal_s == Some(0) {
        return Some(format!(
            "a token is good for 0 to {TOKEN_LIFETIME_S_MAX} seconds, and is renewed after 1 second or later"
        ));
    }
    program.as_deref().and_then(program::fault)
}

/// Why logins by a web page cannot be asked for so.
fn oidc_fault(settings: &LoginSettings) -> Option<String> {
    match (settings.auth, &settings.oidc) {
        (Auth::Oidc, None) => Some(
            "--auth oidc needs an identity provider: --oidc-issuer, --oidc-client-id, --oidc-redirect"
                .into(),
        ),
        (Auth::Oidc, Some(_)) if settings.token_lifetime_s == Some(0) => Some(
            "a login by a web page needs tokens, as nobody logs in at each new key: --token-lifetime 1 or more"
                .into(),
        ),
        (Auth::Oidc, Some(oidc)) => oidc::fault(oidc),
        (_, Some(_)) => Some("an identity provider goes with --auth oidc".into()),
        (_, None) => None,
    }
}

/// The name by which a client is known that has shown these, once they are found to be good; the text says why it
/// cannot be let in.
pub(super) fn name_of(
    settings: &LoginSettings,
    certificate: Option<&str>,
    user: &str,
) -> Result<String, &'static str> {
    let own = match (settings.auth, settings.client_name) {
        (Auth::Password, _) => user,
        (Auth::Both | Auth::Oidc, ClientName::User) => {
            certificate.ok_or(super::NO_CERTIFICATE)?;
            user
        }
        (Auth::Certificate, _) | (Auth::Both | Auth::Oidc, ClientName::Certificate) => {
            certificate.ok_or(super::NO_CERTIFICATE)?
        }
        (Auth::Both | Auth::Oidc, ClientName::Same) => {
            let certificate = certificate.ok_or(super::NO_CERTIFICATE)?;
            if certificate != user {
                return Err(super::OTHER_USER);
            }
            certificate
        }
    };
    // A certificate's name has been judged: a foreign authority's may have spaces and other signs.
    if certificate != Some(own) {
        check_name(own).map_err(|_| super::NO_NAME)?;
    }
    Ok(own.to_owned())
}

#[cfg(test)]
mod tests {
    use weft_api::OidcSettings;

    use super::*;

    fn both(client_name: ClientName) -> LoginSettings {
        LoginSettings { auth: Auth::Both, client_name, ..LoginSettings::default() }
    }

    #[test]
    fn a_client_is_known_by_the_name_that_was_asked_for() {
        let certificate = LoginSettings::default();
        assert_eq!(name_of(&certificate, Some("laptop"), ""), Ok("laptop".into()));
        let password = LoginSettings { auth: Auth::Password, ..LoginSettings::default() };
        assert_eq!(name_of(&password, None, "anna"), Ok("anna".into()));
        assert_eq!(name_of(&password, None, "a/b"), Err(super::super::NO_NAME));
        let other = Err(super::super::OTHER_USER);
        assert_eq!(name_of(&both(ClientName::Same), Some("laptop"), "anna"), other);
        assert_eq!(name_of(&both(ClientName::Same), Some("anna"), "anna"), Ok("anna".into()));
        let by = |name| name_of(&both(name), Some("laptop"), "anna");
        assert_eq!(by(ClientName::User), Ok("anna".into()));
        assert_eq!(by(ClientName::Certificate), Ok("laptop".into()));
        for name in [ClientName::Same, ClientName::Certificate] {
            assert_eq!(name_of(&both(name), None, "anna"), Err(super::super::NO_CERTIFICATE));
        }
    }

    #[test]
    fn settings_that_mean_nothing_together_are_refused() {
        let none = LoginSettings::default();
        assert_eq!(fault(&none), None);
        let cases = [
            (LoginSettings { client_name: ClientName::User, ..none.clone() }, "--client-name"),
            (LoginSettings { program: Some("/bin/true".into()), ..none.clone() }, "--auth both"),
            (LoginSettings { token_lifetime_s: Some(9), ..none }, "--auth both"),
            (LoginSettings { token_renewal_s: Some(0), ..both(ClientName::Same) }, "renewed after"),
            (LoginSettings { program: Some("judge".into()), ..both(ClientName::Same) }, "absolute"),
        ];
        for (settings, expected) in cases {
            let text = fault(&settings).unwrap_or_default();
            assert!(text.contains(expected), "{settings:?}: {text}");
        }
        let provider = Some(OidcSettings {
            issuer: "https://id.example.com".into(),
            client_id: "weft".into(),
            redirect: "https://vpn.example.com:9443/callback".into(),
            certificate: Some("/c".into()),
            key: Some("/k".into()),
            ..OidcSettings::default()
        });
        let oidc = LoginSettings { auth: Auth::Oidc, oidc: provider, ..LoginSettings::default() };
        assert_eq!(fault(&LoginSettings { client_name: ClientName::User, ..oidc.clone() }), None);
        let cases = [
            (LoginSettings { oidc: None, ..oidc.clone() }, "--oidc-issuer"),
            (LoginSettings { auth: Auth::Both, ..oidc.clone() }, "--auth oidc"),
            (LoginSettings { token_lifetime_s: Some(0), ..oidc.clone() }, "1 or more"),
            (LoginSettings { program: Some("/bin/true".into()), ..oidc }, "--auth both"),
        ];
        for (settings, expected) in cases {
            let text = fault(&settings).unwrap_or_default();
            assert!(text.contains(expected), "{settings:?}: {text}");
        }
        let unlimited =
            LoginSettings { token_lifetime_s: Some(u32::MAX), ..both(ClientName::Same) };
        assert!(fault(&unlimited).is_some());
        let without = LoginSettings { token_lifetime_s: Some(0), ..both(ClientName::Same) };
        assert_eq!((fault(&without), tokens(&without)), (None, None));
        assert_eq!(tokens(&both(ClientName::Same)), Some((43_200, 3_600)));
    }
}
