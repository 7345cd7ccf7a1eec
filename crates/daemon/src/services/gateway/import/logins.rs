//! How clients of a server that was taken over log in.

use std::path::Path;

use weft_api::{Auth, ClientName, LoginSettings};
use weft_openvpn::config::{ServerSettings, TokenSettings, VerifyClientCert};

use super::Imported;
use crate::services::gateway::login::TOKEN_LIFETIME_S_MAX;

/// Notes on lines that are taken.
const VARIABLES: &str = "its environment has username, common_name, tls_serial_0, tls_serial_hex_0, untrusted_ip, \
    untrusted_ip6, untrusted_port, IV_ and UV_ of the client, and what setenv and setenv-safe say: \
    check that it needs no other variable";
const USER_NAMES: &str = "a user name has letters, digits and .-_@+ here";
const NO_NAMES: &str = "clients are known by their user names, which have letters, digits and .-_@+ here; \
    a user may be connected several times, as with duplicate-cn";

/// Whether the configuration asks for a user name and a password.
pub(super) const fn has_login(settings: &ServerSettings) -> bool {
    settings.login_program.is_some() || settings.pam_service.is_some()
}

/// Whether clients have no name but that of their user, which OpenVPN does not take for one: a user may be connected
/// several times.
pub(super) const fn has_no_names(settings: &ServerSettings) -> bool {
    let asks_no_certificate = matches!(settings.client_cert, VerifyClientCert::None);
    asks_no_certificate && has_login(settings) && !settings.names_by_user
}

/// The note on a line about logins that is taken; `None`: there is nothing to note.
pub(super) fn note(directive: &str, settings: &ServerSettings) -> Option<&'static str> {
    match directive {
        "auth-user-pass-verify" => Some(VARIABLES),
        "username-as-common-name" => Some(USER_NAMES),
        "verify-client-cert" | "client-cert-not-required" if has_no_names(settings) => {
            Some(NO_NAMES)
        }
        _ => None,
    }
}

/// What a configuration says of logins. `program` judges passwords in the place of those that it names.
pub(super) fn settings(settings: &ServerSettings, program: Option<&Path>) -> LoginSettings {
    if !has_login(settings) {
        return LoginSettings::default();
    }
    let (auth, client_name) = match (settings.client_cert, settings.names_by_user) {
        (VerifyClientCert::Require, true) => (Auth::Both, ClientName::User),
        (VerifyClientCert::Require, false) => (Auth::Both, ClientName::Certificate),
        (VerifyClientCert::Optional | VerifyClientCert::None, _) => {
            (Auth::Password, ClientName::Same)
        }
    };
    let own = settings.login_program.as_ref().map(|program| Path::new(&program.command));
    let (token_lifetime_s, token_renewal_s) = match settings.tokens {
        None => (0, None),
        Some(TokenSettings { lifetime_s, renewal_s, .. }) => {
            let seconds = |seconds: u64| u32::try_from(seconds).unwrap_or(u32::MAX);
            let lifetime_s = lifetime_s.map_or(TOKEN_LIFETIME_S_MAX, seconds);
            // As OpenVPN has it: with each renewal of keys.
            let with_keys = Some(settings.tls.renew_s).filter(|seconds| *seconds > 0);
            (lifetime_s.min(TOKEN_LIFETIME_S_MAX), renewal_s.map(seconds).or(with_keys))
        }
    };
    LoginSettings {
        auth,
        client_name,
        program: program.or(own).map(Path::to_path_buf),
        token_lifetime_s: Some(token_lifetime_s),
        token_renewal_s,
        oidc: None,
    }
}

impl Imported {
    /// How clients log in, where `asked` says nothing else.
    pub(super) fn login(&self, asked: LoginSettings) -> LoginSettings {
        let own = settings(&self.settings, self.saved.auth_program.as_deref());
        if !own.auth.has_password() {
            return asked;
        }
        let (token_lifetime_s, token_renewal_s) = (
            asked.token_lifetime_s.or(own.token_lifetime_s),
            asked.token_renewal_s.or(own.token_renewal_s),
        );
        if asked.auth == Auth::Oidc {
            return asked;
        }
        let by = match asked.auth.has_password() {
            true => asked,
            // A certificate is what is asked for where nothing is said.
            false => LoginSettings { program: asked.program.or(own.program), ..own },
        };
        LoginSettings { token_lifetime_s, token_renewal_s, ..by }
    }

    /// Whether clients may be let in without a certificate.
    pub(in crate::services::gateway) fn allows_passwords_alone(&self) -> bool {
        self.settings.client_cert != VerifyClientCert::Require
    }

    /// Which certificates clients show, if they log in so.
    pub(super) fn client_cert(&self, auth: Auth) -> VerifyClientCert {
        match auth.has_certificate() {
            true => VerifyClientCert::Require,
            false => self.settings.client_cert,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::Saved;
    use super::*;

    fn login(lines: &str, program: Option<&str>) -> LoginSettings {
        let text = format!("{lines}\nreneg-sec 1800\n");
        let saved = Saved { config: zeroize::Zeroizing::new(text), ..Saved::default() };
        let reading = super::super::Reading::of(&saved);
        settings(&reading.settings, program.map(Path::new))
    }

    #[test]
    fn passwords_and_names_are_those_of_the_server() {
        const SCRIPT: &str = "auth-user-pass-verify /etc/judge via-file\n";
        assert_eq!(login("auth-gen-token", None), LoginSettings::default());
        let both = login(SCRIPT, None);
        assert_eq!((both.auth, both.client_name), (Auth::Both, ClientName::Certificate));
        assert_eq!(both.program.as_deref(), Some(Path::new("/etc/judge")));
        assert_eq!((both.token_lifetime_s, both.token_renewal_s), (Some(0), None));
        let user = login(&format!("{SCRIPT}username-as-common-name\nauth-gen-token"), None);
        assert_eq!((user.auth, user.client_name), (Auth::Both, ClientName::User));
        // For ever, and with each key.
        assert_eq!(user.token_lifetime_s, Some(TOKEN_LIFETIME_S_MAX));
        assert_eq!(user.token_renewal_s, Some(1_800));
        let pam = "plugin /lib/openvpn-plugin-auth-pam.so login\nverify-client-cert none\n";
        let alone = login(&format!("{pam}auth-gen-token 600 60"), Some("/etc/pam"));
        assert_eq!((alone.auth, alone.client_name), (Auth::Password, ClientName::Same));
        assert_eq!(alone.program.as_deref(), Some(Path::new("/etc/pam")));
        assert_eq!((alone.token_lifetime_s, alone.token_renewal_s), (Some(600), Some(60)));
    }

    #[test]
    fn users_without_certificates_may_be_connected_several_times() {
        const SCRIPT: &str = "auth-user-pass-verify /etc/judge via-file\n";
        for (lines, allows) in [
            ("verify-client-cert none\n", true),
            ("client-cert-not-required\n", true),
            ("verify-client-cert none\nusername-as-common-name\n", false),
            ("verify-client-cert none\nusername-as-common-name\nduplicate-cn\n", true),
            ("", false),
        ] {
            let config = zeroize::Zeroizing::new(format!("{SCRIPT}{lines}"));
            let reading = super::super::Reading::of(&Saved { config, ..Saved::default() });
            assert_eq!(reading.settings.allows_duplicates, allows, "{lines}");
        }
    }
}
