//! Versions of the CNI specification, and the differences among them.

use std::fmt;

/// A version of the specification that the plugin speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 0.3.0: lists of interfaces and addresses, `prevResult` at ADD.
    V0_3_0,
    /// 0.3.1: the same.
    V0_3_1,
    /// 0.4.0: CHECK, and `prevResult` at DEL.
    V0_4_0,
    /// 1.0.0: addresses without their family.
    V1_0_0,
    /// 1.1.0: GC and STATUS, and the MTU of interfaces.
    V1_1_0,
}

impl Version {
    /// All, oldest first.
    pub const ALL: [Self; 5] =
        [Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    /// The newest.
    pub const LATEST: Self = Self::V1_1_0;

    /// The version as configurations write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// The version that a configuration names; `None` for any other.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    pub(super) fn has_check(self) -> bool {
        self >= Self::V0_4_0
    }

    pub(super) fn has_gc_and_status(self) -> bool {
        self >= Self::V1_1_0
    }

    /// Whether each address of a result states its family.
    pub(super) fn states_family(self) -> bool {
        self < Self::V1_0_0
    }

    /// Whether interfaces of a result have an MTU.
    pub(super) fn has_mtu(self) -> bool {
        self >= Self::V1_1_0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// All versions as one text, for messages.
pub(super) fn supported() -> String {
    Version::ALL.map(Version::as_str).join(", ")
}
