//! A configuration that several hosts serve by: the host that has taken it over is its home, and tells the others.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use zeroize::Zeroizing;

use super::{FILE, Imported, Saved};
use crate::services::gateway::peers::IMPORT_FINGERPRINT;
use crate::services::gateway::{Gateway, WANTED_FILE, Wanted};

impl Imported {
    /// Whether another host has taken it over, which alone changes it.
    pub(in crate::services::gateway) const fn is_replica(&self) -> bool {
        self.saved.is_replica
    }

    /// How other hosts know it from authorities and other configurations: later ones of its home have the same.
    pub(in crate::services::gateway) fn fingerprint(&self) -> String {
        format!("{IMPORT_FINGERPRINT}{:016x}", self.saved.family())
    }

    /// How often each name was revoked by hand.
    pub(in crate::services::gateway) fn revoked_by_hand(&self) -> BTreeMap<String, u32> {
        let issued = self.saved.issued.iter().filter(|issued| issued.revoked.is_some());
        let names = issued.map(|issued| &issued.name).chain(self.saved.revoked_names.keys());
        let mut all = BTreeMap::new();
        for name in names {
            *all.entry(name.clone()).or_default() += 1;
        }
        all
    }

    /// What other hosts get: all but the authority's private key. It has the server's.
    fn for_others(&self) -> Saved {
        Saved { ca_key: None, is_replica: true, ..self.saved.clone() }
    }

    /// Reads the configuration that its home has sent. `fingerprint` is the one that the home announced.
    ///
    /// # Errors
    /// It is none that another host is to have, or cannot be served by.
    fn told(content: &str, fingerprint: &str) -> Result<Self, String> {
        // The error itself may have words of the text, which holds keys.
        let saved: Saved = serde_json::from_str(content)
            .map_err(|_| "this version of weft cannot read the configuration")?;
        if !saved.is_replica || saved.ca_key.is_some() {
            return Err("it has a private key that no other host is to have".into());
        }
        let told = Self::new(saved)?;
        match told.fingerprint() == fingerprint {
            true => Ok(told),
            false => Err("it is another configuration than its home tells".into()),
        }
    }

    /// Why the program that is to judge passwords is not run on this host; `None`: it is, or there is none. It runs as
    /// root, and clients choose what it reads. So the configuration of host `home` has none run here but one that this
    /// host's administrator has named, too.
    fn program_fault(&self, wanted: &Wanted, home: &str) -> Option<String> {
        let program = wanted.request.login.program.as_ref()?;
        (self.is_replica() && wanted.program.as_ref() != Some(program)).then(|| {
            format!(
                "the configuration of host {home} has {0} judge passwords, as root: look at that program on this host, then run weft openvpn serve --auth-program {0} here",
                program.display()
            )
        })
    }
}

impl Gateway {
    /// The configuration for other hosts; `None`: it is not at home here.
    pub(in crate::services::gateway) fn import_document(&self) -> Option<Zeroizing<String>> {
        let import = self.imported_now().filter(|import| !import.is_replica())?;
        serde_json::to_string(&import.for_others()).ok().map(Zeroizing::new)
    }

    /// Takes the configuration of its home, which others know by this fingerprint, and serves by it. It may wait for
    /// the disk, and for a request.
    ///
    /// # Errors
    /// It cannot be served by, or cannot be saved.
    pub(in crate::services::gateway) fn take_import(
        &self,
        content: Option<&str>,
        fingerprint: &str,
    ) -> Result<(), String> {
        let content = content.ok_or("the home has taken no configuration over")?;
        let now = Arc::new(Imported::told(content, fingerprint)?);
        // No request changes meanwhile what is wanted. One that waits for the first configuration holds the lock.
        let _one = self.imported_now().map(|_| self.changing.blocking_lock());
        let (before, wanted) = (self.imported_now(), self.wanted_now());
        if before.as_ref().is_some_and(|before| !before.is_replica()) {
            return Err("this host has taken a configuration over itself".into());
        }
        if self.peers.is_ending() {
            return Err("this daemon ends: the next one takes it".into());
        }
        let is_other = before.as_ref().is_none_or(|before| before.id() != now.id());
        let wanted = wanted.filter(|_| is_other).map(|wanted| match wanted.import {
            Some(id) if id == now.id() => wanted,
            _ => now.follow(wanted, before.as_deref()),
        });
        // First: after a crash before the next step the configuration comes once more, and both fit again.
        if wanted.is_some() {
            self.store.save(WANTED_FILE, &wanted).map_err(|error| error.to_string())?;
        }
        self.store.save(FILE, &now.saved).map_err(|error| error.to_string())?;
        *self.import.lock().unwrap_or_else(PoisonError::into_inner) = Some(Ok(now));
        if let Some(wanted) = wanted {
            // The gateway begins anew, unless it is ending.
            self.wanted.send_if_modified(|it| it.is_some() && it.replace(wanted).is_some());
        }
        self.follow_logins()
    }

    /// Why the program that is to judge passwords is not run on this host; `None`: it is, or there is none.
    pub(in crate::services::gateway) fn program_fault(&self, wanted: &Wanted) -> Option<String> {
        let import = self.imported_now()?;
        let home = self.shown_home().map(|home| home.name).unwrap_or_default();
        import.program_fault(wanted, &home)
    }

    /// Why this host does not change the configuration that it serves by; `None`: it may.
    pub(super) fn import_elsewhere(&self) -> Option<String> {
        self.imported_now().filter(|import| import.is_replica())?;
        let home = self.shown_home().map(|home| home.name).unwrap_or_default();
        Some(format!(
            "this host serves by the configuration that host {home} has taken over: run this there; weft openvpn import FILE --replace gives this host one of its own"
        ))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::*;

    const CONFIG: &str = "auth-user-pass-verify /etc/judge via-file\n";

    fn imported() -> Imported {
        let saved = Saved {
            id: 7,
            config: Zeroizing::new(CONFIG.into()),
            ca_key: Some(Zeroizing::new("the authority's key".into())),
            network: "openvpn".into(),
            ..Saved::default()
        };
        Imported::new(saved).unwrap()
    }

    /// What goes to other hosts.
    fn document(import: &Imported) -> String {
        serde_json::to_string(&import.for_others()).unwrap()
    }

    #[test]
    fn another_host_gets_all_but_the_authoritys_key() {
        let import = imported();
        let text = document(&import);
        assert!(!text.contains("the authority's key"));
        let told = Imported::told(&text, &import.fingerprint()).unwrap();
        assert!(told.is_replica() && !import.is_replica());
        assert_eq!(
            (told.id(), told.network(), &*told.saved.config),
            (7, "openvpn", &CONFIG.to_owned())
        );
        // A later one of the same home is followed.
        let later = Saved { id: 8, family: 7, ..told.saved };
        assert_eq!(Imported::new(later).unwrap().fingerprint(), import.fingerprint());
    }

    #[test]
    fn what_no_home_would_tell_is_refused_without_its_words() {
        let import = imported();
        let fingerprint = import.fingerprint();
        let of = fingerprint.as_str();
        let own = serde_json::to_string(&import.saved).unwrap();
        let with_key = Saved { is_replica: true, ..import.saved.clone() };
        let with_key = serde_json::to_string(&with_key).unwrap();
        let odd = document(&import).replace("\"id\":7", "\"id\":\"a secret\"");
        for (text, of, why) in [
            (own, of, "no other host is to have"),
            (with_key, of, "no other host is to have"),
            (document(&import), "import-0000000000000008", "another configuration"),
            (odd, of, "cannot read the configuration"),
        ] {
            let refused = Imported::told(&text, of).err().unwrap();
            assert!(refused.contains(why) && !refused.contains("secret"), "{refused}");
        }
    }

    #[test]
    fn a_program_that_another_host_names_is_run_only_if_it_was_named_here() {
        let home = imported();
        let replica = Imported::told(&document(&home), &home.fingerprint()).unwrap();
        let wanted = |import: &Imported, program: Option<&str>| {
            let request = import.fill(weft_api::ServeRequest::default());
            assert_eq!(request.login.program.as_deref(), Some(Path::new("/etc/judge")));
            Wanted { request, import: Some(7), program: program.map(Into::into), is_by_file: false }
        };
        assert_eq!(home.program_fault(&wanted(&home, None), "h"), None);
        assert_eq!(replica.program_fault(&wanted(&replica, Some("/etc/judge")), "h"), None);
        for program in [None, Some("/etc/other")] {
            let fault = replica.program_fault(&wanted(&replica, program), "h").unwrap();
            assert!(fault.contains("host h has /etc/judge") && fault.contains("--auth-program"));
        }
        // A later configuration names another one.
        let text = document(&home).replace("/etc/judge", "/bin/sh");
        let later = Imported::told(&text, &home.fingerprint()).unwrap();
        let followed = later.follow(wanted(&replica, Some("/etc/judge")), Some(&replica));
        assert!(later.program_fault(&followed, "h").unwrap().contains("/bin/sh"));
    }
}
