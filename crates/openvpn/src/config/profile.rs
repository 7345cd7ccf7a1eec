//! Writes a client's profile: one file with everything in it, for any stock client.

use zeroize::Zeroizing;

use crate::device::KeyBlock;
use crate::messages::Secret;
use crate::static_key::ClientKeyV2;
use crate::words::{self, WordsError};

/// Most servers of a profile: OpenVPN takes no more.
const REMOTES_MAX: usize = 64;

/// How long a client waits for the first word of a server before it tries the next, in seconds. OpenVPN asks again after
/// two.
const SILENT_SERVER_S: u32 = 3;

/// A profile cannot be written: the caller's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// No server, or too many.
    #[error("a profile has 1 to {REMOTES_MAX} servers, not {0}")]
    Remotes(usize),
    /// A host that is none.
    #[error("{0:?} is no host name or address")]
    Host(String),
    /// A text that no line can hold.
    #[error("{0:?} cannot be written: {1}")]
    Word(String, WordsError),
    /// Something else than PEM.
    #[error("the {0} of the profile is not PEM")]
    NotPem(&'static str),
}

/// How the control channel is wrapped.
#[derive(Clone, Copy, Debug)]
pub enum Wrapping<'a> {
    /// Not at all.
    None,
    /// With tls-auth: the key, the client's direction, the digest.
    TlsAuth(&'a KeyBlock, Option<u8>, &'a str),
    /// With tls-crypt.
    TlsCrypt(&'a KeyBlock),
    /// With tls-crypt-v2.
    TlsCryptV2(&'a ClientKeyV2),
}

/// What goes into a profile.
#[derive(Clone, Copy, Debug)]
pub struct NewProfile<'a> {
    /// A line for people, at the top.
    pub comment: &'a str,
    /// Servers: host, port, TCP.
    pub remotes: &'a [(String, u16, bool)],
    /// They are tried in a random order.
    pub is_random: bool,
    /// The authority of the servers' certificates, PEM.
    pub ca: &'a str,
    /// The client's certificate and key, PEM.
    pub cert: Option<(&'a str, &'a Secret)>,
    /// How the control channel is wrapped.
    pub wrapping: Wrapping<'a>,
    /// The common name of the servers' certificates.
    pub server_name: Option<&'a str>,
    /// The client asks its user for name and password.
    pub asks_password: bool,
    /// A question beside the password, and whether the answer is shown.
    pub challenge: Option<(&'a str, bool)>,
}

impl NewProfile<'_> {
    /// The text. It holds the client's key.
    ///
    /// # Errors
    /// [`ProfileError`]
    pub fn to_text(&self) -> Result<Zeroizing<String>, ProfileError> {
        let mut out = Zeroizing::new(String::with_capacity(16 * 1024));
        let comment = self.comment.replace(char::is_control, " ");
        out.push_str(&format!("# {comment}\nclient\ndev tun\n"));
        self.remotes(&mut out)?;
        out.push_str("resolv-retry infinite\nnobind\npersist-key\n");
        // With redirect-gateway, the old tunnel's routes would lead to a further server's address.
        if self.remotes.windows(2).all(|pair| pair[0].0 == pair[1].0) {
            out.push_str("persist-tun\n");
        }
        out.push_str("remote-cert-tls server\n");
        if let Some(name) = self.server_name {
            out.push_str(&format!("verify-x509-name {} name\n", quoted(name)?));
        }
        if self.asks_password {
            out.push_str("auth-user-pass\n");
        }
        if let Some((question, echo)) = self.challenge {
            out.push_str(&format!("static-challenge {} {}\n", quoted(question)?, u8::from(echo)));
        }
        out.push_str("verb 3\n");
        block(&mut out, "ca", self.ca)?;
        if let Some((cert, key)) = self.cert {
            block(&mut out, "cert", cert)?;
            block(&mut out, "key", key.expose())?;
        }
        self.wrapping(&mut out)?;
        Ok(out)
    }

    fn remotes(&self, out: &mut String) -> Result<(), ProfileError> {
        if !(1..=REMOTES_MAX).contains(&self.remotes.len()) {
            return Err(ProfileError::Remotes(self.remotes.len()));
        }
        for (host, port, is_tcp) in self.remotes {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
            if host.is_empty() || host.len() > 253 || !host.bytes().all(is_plain) {
                return Err(ProfileError::Host(host.clone()));
            }
            let proto = if *is_tcp { "tcp" } else { "udp" };
            out.push_str(&format!("remote {host} {port} {proto}\n"));
        }
        if self.is_random {
            out.push_str("remote-random\n");
        }
        if self.remotes.len() > 1 {
            // OpenVPN waits two minutes for the first word of a server.
            out.push_str(&format!("connect-timeout {SILENT_SERVER_S}\n"));
        }
        Ok(())
    }

    fn wrapping(&self, out: &mut String) -> Result<(), ProfileError> {
        match self.wrapping {
            Wrapping::None => Ok(()),
            Wrapping::TlsAuth(key, direction, digest) => {
                out.push_str(&format!("auth {}\n", quoted(digest)?));
                if let Some(direction) = direction {
                    out.push_str(&format!("key-direction {direction}\n"));
                }
                block(out, "tls-auth", &key.to_text())
            }
            Wrapping::TlsCrypt(key) => block(out, "tls-crypt", &key.to_text()),
            Wrapping::TlsCryptV2(key) => block(out, "tls-crypt-v2", &key.to_text()),
        }
    }
}

fn quoted(word: &str) -> Result<String, ProfileError> {
    words::quote(word).map_err(|error| ProfileError::Word(word.to_owned(), error))
}

fn block(out: &mut String, name: &'static str, content: &str) -> Result<(), ProfileError> {
    let has_end = content.lines().any(|line| line.trim_start().starts_with("</"));
    if !content.contains("-----BEGIN ") || !content.contains("-----END ") || has_end {
        return Err(ProfileError::NotPem(name));
    }
    out.push_str(&format!("<{name}>\n{}\n</{name}>\n", content.trim_end()));
    Ok(())
}
