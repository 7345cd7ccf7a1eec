//! The network's secret: a chosen password, or random bytes.

use std::fmt;

use zeroize::Zeroizing;

use crate::error::LinkError;
use crate::limits::SECRET_MAX_BYTES;

/// A password or a random network secret: zeroized when dropped, never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes ownership of a password; the caller erases its other copies.
    ///
    /// # Errors
    /// [`LinkError::SecretLength`] unless it has 1 to 1024 bytes.
    pub fn new(bytes: Vec<u8>) -> Result<Self, LinkError> {
        let bytes = Zeroizing::new(bytes);
        if bytes.is_empty() || bytes.len() > SECRET_MAX_BYTES {
            return Err(LinkError::SecretLength);
        }
        Ok(Self(bytes))
    }

    /// 32 random bytes: the secret of a network without a chosen password.
    pub fn random() -> Self {
        let mut bytes = Zeroizing::new(vec![0; 32]);
        rand::fill(bytes.as_mut_slice());
        Self(bytes)
    }

    /// The secret itself, to be stored in a file that only root can read. Never log it.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(secret)")
    }
}
