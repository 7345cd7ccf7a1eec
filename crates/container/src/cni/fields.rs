//! Reads fields of a JSON object whose shape cannot be trusted. An absent field and `null` are the
//! same, since Go writes `null` for an empty list.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::{CniError, Code};

/// The longest value that a message quotes, in bytes.
const QUOTED_BYTES_MAX: usize = 100;

/// An object, with the path that leads to it for messages.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    map: Option<&'a Map<String, Value>>,
    path: &'static str,
}

impl<'a> Fields<'a> {
    /// The fields of the whole configuration.
    pub(super) fn of(map: &'a Map<String, Value>) -> Self {
        Self { map: Some(map), path: "" }
    }

    /// The value of a field that is present and not null.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.map?.get(key).filter(|value| !value.is_null())
    }

    /// Whether the field is there, null included.
    pub(super) fn has(self, key: &str) -> bool {
        self.map.is_some_and(|map| map.contains_key(key))
    }

    /// An object in a field; one without fields if it is absent.
    pub(super) fn object(self, key: &'static str, path: &'static str) -> Result<Self, CniError> {
        match self.get(key) {
            None => Ok(Self { map: None, path }),
            Some(Value::Object(map)) => Ok(Self { map: Some(map), path }),
            Some(other) => Err(self.wrong_type(key, "an object", other)),
        }
    }

    pub(super) fn text(self, key: &str) -> Result<Option<&'a str>, CniError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    pub(super) fn flag(self, key: &str) -> Result<bool, CniError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong_type(key, "true or false", other)),
        }
    }

    /// A list of at most `most` values of one type; empty if absent.
    pub(super) fn list<T: DeserializeOwned>(
        self,
        key: &str,
        most: usize,
    ) -> Result<Vec<T>, CniError> {
        let values = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => values,
            Some(other) => return Err(self.wrong_type(key, "a list", other)),
        };
        if values.len() > most {
            let count = values.len();
            return Err(
                self.wrong_value(key, &format!("{count} entries, at most {most} are possible"))
            );
        }
        values.iter().map(|value| self.read(key, value)).collect()
    }

    /// A value of a type that serde knows; `None` if absent.
    pub(super) fn value<T: DeserializeOwned>(self, key: &str) -> Result<Option<T>, CniError> {
        self.get(key).map(|value| self.read(key, value)).transpose()
    }

    fn read<T: DeserializeOwned>(self, key: &str, value: &Value) -> Result<T, CniError> {
        T::deserialize(value).map_err(|error| {
            let why = format!("{}{key}: {error} in {}", self.path, quote(value));
            CniError::new(Code::Decode, format!("cannot decode {}{key}", self.path), why)
        })
    }

    /// A field that is well formed, but wrong.
    pub(super) fn wrong_value(self, key: &str, why: &str) -> CniError {
        let field = format!("{}{key}", self.path);
        CniError::new(Code::InvalidConfig, format!("invalid {field}"), format!("{field}: {why}"))
    }

    /// A field that Weft cannot obey. The specification wants key and value in the message.
    pub(super) fn unsupported(self, key: &str, value: &Value, why: &str) -> CniError {
        let msg = format!("unsupported field {}{key}: {}", self.path, quote(value));
        CniError::new(Code::UnsupportedField, msg, why)
    }

    /// The names of all fields.
    pub(super) fn all(self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.into_iter().flatten()
    }

    fn wrong_type(self, key: &str, wanted: &str, found: &Value) -> CniError {
        let field = format!("{}{key}", self.path);
        let why = format!("{field} must be {wanted}, and is {}", quote(found));
        CniError::new(Code::Decode, format!("cannot decode {field}"), why)
    }
}

fn quote(value: &Value) -> String {
    super::error::shorten(value.to_string(), QUOTED_BYTES_MAX)
}
